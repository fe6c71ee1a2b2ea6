"""What Mallen et al. (2023) report, to stand beside what is measured.

Their LMs are far larger, their corpus is Wikipedia, and they ask all 14,267 questions: GPT-3 davinci-003 zero-shot, the
open LMs 15-shot. OPT-13B's figures are those that the official notebook prints (adaptive-retrieval.ipynb).
"""

TITLE = "Mallen et al. 2023"

# Section 5, table 1: (closed book is right, the answer with Contriever's document is) -> share, recall@1.
HELP_AND_HARM = {
    (True, True): (0.24, 0.83),
    (True, False): (0.10, 0.14),
    (False, True): (0.17, 0.88),
    (False, False): (0.49, 0.11),
}

RAREST_QUESTIONS, ALL_QUESTIONS = 4000, 14267

# What is said of each figure of the report, under it.
ACCURACY = (
    "The paper: davinci-003 is right for 34% closed book, and for 41% with Contriever's first document (table 1); "
    "OPT-13B for 17.2% closed book, and for 25.4% with BM25's."
)
ADAPTIVE = (
    "The paper: adaptive retrieval with davinci-003, GenRead where it knows and Contriever where it does not, is right "
    "for 46.5%, 5.3 points above the best way without a policy; OPT-13B, closed book or BM25, for 27.1%."
)
RAREST = "The paper: of the 4,000 rarest questions three LMs, from the smallest to davinci-003, know 15%, 16% and 19%."
SHARE = "The paper: davinci-003 retrieves for 40% of the questions, OPT-13B with BM25 for 80%, GPT-NeoX for under 80%."
COST = "The paper: dollars for 1,000 questions to davinci-003, from closed book to GenRead: 0.46, 3.08, 2.80, 3.25."
