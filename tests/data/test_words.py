"""Words of texts in scripts with and without blanks, to search by and to compare by."""

import unicodedata

import numpy as np
import pytest

from replug.data.words import compared_words, ngram_hashes, overlaps, search_words

SEARCHED = {
    "The Loire flows, 1,006 km.": ["the", "loire", "flows", "006", "km"],
    "L\u2019e\u0301te\u0301 \u2014 STRASSE": ["e\u0301te\u0301", "strasse"],
    "हिन्दी में": ["हिन्दी", "में"],  # of letters with marks
    "莱茵河流经NFL，海": ["莱茵", "茵河", "河流", "流经", "nfl", "海"],
    "ラーメンを3杯": ["ラー", "ーメ", "メン", "ンを", "杯"],
    "ภาษา": ["ภา", "าษ", "ษา"],
    "": [],
}


@pytest.mark.parametrize("text", SEARCHED)
def test_a_text_is_searched_by_its_words_or_pairs_of_characters(text: str) -> None:
    assert search_words(text) == SEARCHED[text]


SHARED = {
    "Chinese": "莱茵河是西欧第一大河发源于瑞士境内的阿尔卑斯山北麓"
    "西北流经列支敦士登奥地利法国德国和荷兰最后在鹿特丹附近注入北海",
    "Japanese": "東京は日本の首都であり世界最大級の都市圏を形成している"
    "その人口はおよそ三千七百万人に達し経済の中心でもある",
    "Thai": "แม่น้ำเจ้าพระยาเป็นแม่น้ำสายหลักของประเทศไทยไหลผ่านกรุงเทพมหานครก่อนลงสู่อ่าวไทยและมีความสำคัญต่อการเกษตรของประเทศ",
    "Hindi": "गंगा भारत की सबसे लंबी नदी है और यह हिमालय से निकलकर बंगाल की खाड़ी में गिरती है",
}


@pytest.mark.parametrize("language", SHARED)
def test_texts_that_share_a_passage_share_an_ngram_and_others_do_not(language: str) -> None:
    passage = SHARED[language]
    first, second = (ngram_hashes(begin + passage + end, 13) for begin, end in (("乙", "甲"), ("กข ", " नया")))
    assert overlaps(first, np.sort(second))
    turned = unicodedata.normalize("NFC", passage[::-1])
    assert not overlaps(first, np.sort(ngram_hashes(turned, 13)))


def test_a_text_is_compared_by_pieces_of_about_two_characters() -> None:
    passage = SHARED["Chinese"]
    pieces = compared_words(passage)
    assert "".join(pieces) == passage and len(passage) / 3 < len(pieces) < len(passage) / 1.5
