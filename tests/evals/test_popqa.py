"""PopQA's questions: reading every form of the set, and shots that are never evaluated."""

import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from replug.config.errors import UserError
from replug.evals.loop import Example
from replug.evals.popqa import TEMPLATES, PopQuestion, plan_shots, question_of, read_popqa
from tests.support.shared_data import shared

ROW = {
    "id": 1,
    "subj": "Ada",
    "prop": "occupation",
    "obj": "writer",
    "s_pop": 142,
    "o_pop": 25692,
    "possible_answers": ["writer", "author"],
}


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def question(relation: str, number: int) -> PopQuestion:
    subject = f"subject {number}"
    example = Example(f"{relation} {number}", question_of(relation, subject), relation)
    return PopQuestion(example, ("x",), subject, f"object {number}", 10.0)


def pool(num_relations: int, each: int) -> list[PopQuestion]:
    return [question(relation, number) for number in range(each) for relation in list(TEMPLATES)[:num_relations]]


def test_published_fields_are_read_and_the_question_follows_from_them(tmp_path):
    [found] = read_popqa(write(tmp_path / "q.jsonl", ROW))
    example = Example("1", "What is Ada's occupation?", "occupation")
    assert found == PopQuestion(example, ("writer", "author"), "Ada", "writer", 142.0, 25692.0)
    assert found.relation == "occupation"


def test_answers_may_be_a_list_in_json_and_popularity_may_be_missing(tmp_path):
    row = {**ROW, "possible_answers": '["writer", "Schriftstellerin ß"]', "s_pop": None}
    [found] = read_popqa(write(tmp_path / "q.jsonl", row))
    assert found.answers == ("writer", "Schriftstellerin ß") and found.subject_popularity is None


def test_the_published_table_is_read(tmp_path):
    path = tmp_path / "popQA.tsv"
    path.write_text(
        "id\tsubj\tprop\tobj\ts_pop\to_pop\tquestion\tpossible_answers\n"
        '4222362\tGeorge Rankin\toccupation\tpolitician\t142\t25692\t"What is George Rankin\'s occupation?"\t'
        '"[""politician"", ""pol""]"\n'
        "5\tChad\tcapital\tN'Djamena\t99\t\tWhat is the capital of Chad?\t[\"N'Djamena\"]\n"
    )
    first, second = read_popqa(path)
    assert (first.example.id, first.answers, first.subject_popularity) == ("4222362", ("politician", "pol"), 142.0)
    assert (second.object, second.answers, second.object_popularity) == ("N'Djamena", ("N'Djamena",), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prop": "shoe size"}, "q.jsonl:1: prop 'shoe size' is no relation known here; expected one of occupation,"),
        ({"subj": " "}, "q.jsonl:1: field 'subj' must be a text, found ' '"),
        ({"obj": None}, "q.jsonl:1: field 'obj' must be a text, found None"),
        ({"question": "Who is Ada?"}, "question 'Who is Ada?' is not what prop 'occupation' and subj make: \"What is"),
        ({"s_pop": -1}, "field 's_pop' must be a count, 0 or more, found -1"),
        ({"s_pop": "many"}, "field 's_pop' must be a count, 0 or more, found 'many'"),
        ({"o_pop": True}, "field 'o_pop' must be a count, 0 or more, found True"),
        ({"possible_answers": []}, "field 'possible_answers' must be a list of texts, at least one, found []"),
        ({"possible_answers": "no list"}, "field 'possible_answers' must be a list of texts, at least one, found 'no"),
        ({"possible_answers": None}, "expected the field 'possible_answers' or 'answers', found neither"),
        ({"answers": ["x"]}, "expected the field 'possible_answers' or 'answers', found possible_answers and answers"),
    ],
)
def test_a_wrong_row_is_named_with_its_line_and_what_was_expected(tmp_path, change, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read_popqa(write(tmp_path / "q.jsonl", {**ROW, **change}))


def test_a_torn_table_and_words_for_numbers_are_named_by_their_line(tmp_path):
    path = tmp_path / "popQA.tsv"
    path.write_text("id\tsubj\n1\n")
    with pytest.raises(UserError, match=r"popQA\.tsv:2: expected 2 cells, as the header has"):
        read_popqa(path)
    path.write_text('subj\tprop\tobj\ts_pop\tpossible_answers\nAda\toccupation\tw\tmany\t["w"]\n')
    with pytest.raises(UserError, match=r"popQA\.tsv:2: field 's_pop' must be a count, 0 or more, found 'many'"):
        read_popqa(path)


def test_popularity_of_some_questions_only_is_refused(tmp_path):
    rows = [ROW, {**ROW, "id": 2, "s_pop": None}]
    with pytest.raises(UserError, match=r"s_pop is missing in 1 of 2 questions, first 2; expected it in all, or in"):
        read_popqa(write(tmp_path / "q.jsonl", *rows))


def test_an_empty_set_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no questions"):
        read_popqa(write(tmp_path / "q.jsonl"))
    with pytest.raises(UserError, match="does not exist"):
        read_popqa(tmp_path / "missing.tsv")
    with pytest.raises(UserError, match=r"holds no files of EntityQuestions; expected some such as P19\.test\.json"):
        read_popqa(tmp_path)


def entity_questions(folder: Path) -> None:
    born = [{"question": f"Where was {name} born?", "answers": [f"{name}town", "x"]} for name in ("Ada", "Bo")]
    (folder / "P19.test.json").write_text(json.dumps(born))
    (folder / "P36.test.json").write_text('[{"question": "What is the capital of Chad?", "answers": ["N\'Djamena"]}]')


def test_entity_questions_have_their_relation_by_the_file_and_their_subject_by_its_template(tmp_path):
    entity_questions(tmp_path)
    ada, bo, chad = read_popqa(tmp_path)
    example = Example("P19.test.json:1", "Where was Ada born?", "P19")
    assert ada == PopQuestion(example, ("Adatown", "x"), "Ada", "Adatown")
    assert (bo.subject, chad.subject, chad.relation) == ("Bo", "Chad", "P36")
    assert read_popqa(tmp_path / "P36.test.json") == [chad]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("P19.test.json", '[{"question": "Who is Ada?", "answers": ["x"]}]', "P19.test.json, question 1: question"),
        ("P19.test.json", '{"question": "x"}', "P19.test.json: expected a JSON array of questions, found dict"),
        ("P19.test.json", "[3]", "P19.test.json, question 1: expected an object, found int"),
        ("P19.test.json", "[", "P19.test.json is not valid JSON"),
        ("P1.test.json", "[]", "P1.test.json: P1 is no relation of EntityQuestions; expected one of P17, P19"),
    ],
)
def test_what_is_no_file_of_entity_questions_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=re.escape(message)):
        read_popqa(tmp_path / name)


def test_fifteen_shots_of_sixteen_relations_are_one_of_each_other_relation():
    plan = plan_shots(pool(16, 4), None, 15, 0)
    assert len(plan[0]) == 16 * 3, "each relation gave one question away"
    for relation, shots in plan[1].items():
        assert len(shots) == 15
        assert Counter(shot.relation for shot in shots) == {r: 1 for r in plan[1] if r != relation}


def test_of_two_relations_all_shots_are_of_the_other_one():
    plan = plan_shots(pool(2, 20), None, 15, 0)
    assert [Counter(shot.relation for shot in shots) for shots in plan[1].values()] == [
        {"place of birth": 15},
        {"occupation": 15},
    ]


def test_shots_are_the_same_for_the_same_seed_in_random_order_and_never_evaluated():
    plans = [plan_shots(pool(5, 10), None, 9, seed) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    asked = {q.example.id for q in plans[0][0]}
    shown = {shot.example.id for shots in plans[0][1].values() for shot in shots}
    assert len(asked) == 50 - 5 * 2 and not asked & shown
    relations = [shot.relation for shot in plans[0][1]["occupation"]]
    assert relations != sorted(relations), "shuffled, not relation by relation"


def test_questions_are_ordered_by_relation_and_within_it_as_the_file_has_them():
    plan = plan_shots(pool(3, 3), None, 0, 0)
    assert [q.example.id for q in plan[0]] == [
        f"{relation} {number}" for relation in ("genre", "occupation", "place of birth") for number in range(3)
    ]
    assert plan[1] == {"genre": (), "occupation": (), "place of birth": ()}


def test_shots_of_another_file_leave_all_questions_to_evaluate():
    asked = [question("occupation", number) for number in range(3)]
    plan = plan_shots(pool(3, 6), asked, 4, 0)
    assert list(plan[0]) == asked
    assert Counter(shot.relation for shot in plan[1]["occupation"]) == {"place of birth": 2, "genre": 2}


def test_a_question_that_is_evaluated_is_no_shot_of_another_file():
    same = pool(2, 4)
    plan = plan_shots(same, same[:2], 3, 0)
    assert not {q.example.id for q in plan[0]} & {s.example.id for of in plan[1].values() for s in of}
    with pytest.raises(UserError, match="4 demonstrations are asked for, but 3 of 4 questions are not evaluated"):
        plan_shots(same, same[:2], 4, 0)


@pytest.mark.parametrize(
    ("relations", "each", "shots", "message"),
    [
        (1, 9, 5, "all questions are of 'occupation'; expected questions.shots=0, or questions.demonstrations=FILE"),
        (4, 9, 2, "questions.shots is 2, but each of 3 other relations gives as many shots; expected 3 or more, or 0"),
        (2, 5, 5, "5 questions of relation 'occupation', but 5 are shown as shots and one at least is to be left"),
    ],
)
def test_too_few_relations_or_questions_for_the_shots_are_named(relations, each, shots, message):
    with pytest.raises(UserError, match=re.escape(message)):
        plan_shots(pool(relations, each), None, shots, 0)


def test_the_shared_set_is_read_and_its_questions_are_those_of_the_templates():
    path = shared("popqa.jsonl.gz")
    questions = read_popqa(path)
    assert Counter(q.relation for q in questions) == {"place of birth": 335, "occupation": 265}
    with gzip.open(path, "rt") as file:
        assert [json.loads(line)["question"] for line in file] == [q.example.query for q in questions]
    assert sum((q.subject_popularity or 0) > 10_000 for q in questions) == 41
