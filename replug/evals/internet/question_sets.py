"""The public sets by the names that `questions.dataset` may say."""

from replug.evals.internet.fever import read_fever
from replug.evals.internet.hotpotqa import read_hotpotqa
from replug.evals.internet.nq import read_nq
from replug.evals.internet.questions import QuestionSet
from replug.evals.internet.situatedqa import read_situatedqa
from replug.evals.internet.strategyqa import read_strategyqa

EXACT_MATCH, ACCURACY = "exact_match", "accuracy"

QUESTION_SETS = {
    "nq": QuestionSet(EXACT_MATCH, read_nq, read_nq),
    "hotpotqa": QuestionSet(EXACT_MATCH, read_hotpotqa, read_hotpotqa),
    "fever": QuestionSet(ACCURACY, read_fever, read_fever),
    "strategyqa": QuestionSet(ACCURACY, read_strategyqa, read_strategyqa),
    "situatedqa": QuestionSet(EXACT_MATCH, read_situatedqa, read_nq),
}
