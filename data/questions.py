"""Make questions about a document by a rule, in any language and without an LM. Pure.

A date, a number or a name is removed from a sentence of the document and becomes the answer; a question word of the
document's language stands before the rest, or in the answer's place if the language has it there. The answer is right
by construction. The questions are unnatural: they train and test a search, and no LM reads them.
"""

import random
from collections.abc import Iterator

import regex

from replug.data.answers import has_answer
from replug.data.prepare.prose import ABBREVIATION, LONGEST_HEADING, MARKS
from replug.data.records import Document
from replug.data.words import search_words

# Question words for a date, a number and a name; languages of IN_PLACE put them in the answer's place.
BEFORE = {
    "en": ("when", "how many", "who or what"),
    "de": ("wann", "wie viele", "wer oder was"),
    "es": ("cuándo", "cuántos", "quién o qué"),
    "fr": ("quand", "combien", "qui ou quoi"),
    "it": ("quando", "quanti", "chi o che cosa"),
    "pt": ("quando", "quantos", "quem ou o quê"),
    "ru": ("когда", "сколько", "кто или что"),
    "ar": ("متى", "كم", "من أو ما"),
    "": ("", "", ""),
}
IN_PLACE = {
    "hi": ("कब", "कितने", "कौन या क्या"),
    "th": ("เมื่อไร", "เท่าไร", "ใครหรืออะไร"),
    "ja": ("いつ", "いくつ", "誰または何"),
    "zh": ("什么时候", "多少", "谁或什么"),
    "ko": ("언제", "얼마", "누구 또는 무엇"),
}
SCRIPTS = {
    "th": r"\p{Thai}",
    "ko": r"\p{Hangul}",
    "ja": r"[\p{Hiragana}\p{Katakana}]",
    "zh": r"\p{Han}",
    "ar": r"\p{Arabic}",
    "hi": r"\p{Devanagari}",
    "ru": r"\p{Cyrillic}",
}
MOST_OF_JAPANESE = 4  # Han characters that stand beside one of kana, at most
FUNCTION_WORDS = {
    "en": "the and of to was is with that",
    "de": "der die das und ist von mit nicht ein eine wurde",
    "es": "el los las y del por es una con en fue",
    "fr": "le les des et du est dans une au par",
    "it": "il di della che gli è per nel un con",
    "pt": "o os do da dos em uma não foi ao no",
}
FEWEST_FUNCTION_WORDS = 12  # at least one of this many words is a function word

# A number with the words and marks that make it a date: 4 December 1969, December 4, 1969, 1969年12月4日.
_YEAR = r"(?<!\d[.,/:]?)(?:1\d|20)\d\d"
_AFTER = r"(?![\d\p{Latin}]|[.,/:]\d)"
DATE = regex.compile(
    r"\d{2,4}年(?:\d{1,2}月)?(?:\d{1,2}日)?|\d{1,2}月\d{1,2}日|\d{4}년(?: \d{1,2}월)?(?: \d{1,2}일)?"
    rf"|(?<![\d.,])\d{{1,2}}\.? (?:de |di )?\p{{L}}[\p{{L}}\p{{M}}]{{2,}} (?:de |di |del )?{_YEAR}{_AFTER}"
    rf"|(?:\p{{Lu}}[\p{{L}}\p{{M}}]{{2,}} \d{{1,2}}, )?{_YEAR}{_AFTER}|(?<=(?:พ|ค)\.ศ\. ?|ปี ?)\d{{4}}{_AFTER}"
)
NUMBER = regex.compile(rf"(?<![\p{{Latin}}\p{{N}}_/:-]|\d[.,])[$€£¥]?\d+(?:[.,٫٬]\d+)*%?{_AFTER}(?![-/]\w)")
_NAME = r"(?:\p{Lu}\p{Ll}{0,2}\.(?= \p{Lu})|\p{Lu}[\p{L}\p{M}\p{N}]*(?:['’.&-]+(?!s\b)[\p{L}\p{M}\p{N}]+)*)"
_LINKS = "of|the|and|de|la|le|del|du|des|di|da|do|dos|von|van|der|den|und|für|y|el"
QUOTED = (
    r"“([^“”]{2,60})”|«\s?([^«»]{2,60}?)\s?»|„([^„“”]{2,60})[“”]|[「『《]([^「」『』《》]{2,40})[」』》]"
    r"|\"([^\"]{2,60})\""
)
CODE = regex.compile(r"`([^`\s]{2,40})`")
NAMES = {
    "cased": regex.compile(rf"(?<=[^\s.!?] ?[\"“„«(']?)\b{_NAME}(?: (?:(?:{_LINKS}) ){{0,2}}{_NAME})*"),
    "latin": regex.compile(r"\b\p{Latin}[\p{Latin}\p{N}]+(?:[ '’.&-]+[\p{Latin}\p{N}]+)*|[\p{Katakana}ー・]{4,}"),
    "quoted": regex.compile(QUOTED),
}

FENCE = regex.compile(r"(?ms)^ {0,3}(```|~~~).*?(?:^ {0,3}\1[^\n]*$|\Z)")
# A line's end is a border after a short line (a heading, an entry), before a list's item and where a line is empty.
BLOCK = regex.compile(r"(?m)\n(?=[ \t]*(?:[-*+•]|\d{1,3}[.)]|#{1,6}|\||\n)[ \t]*)|(?<=^.{0,49})\n|(?<=[。！？])\n")
LEADER = regex.compile(r"(?m)^[ \t]*(?:(?:[#>/*•+-]+|\d{1,3}[.)])[ \t]+)+")
BORDER = regex.compile(r"(?<=[.!?…।؟۔][\"')\]»”’]*)\s+(?=[^\p{Ll}\s])|(?<=[。！？][」』”’）]*)(?![」』”’）])")
THAI_BORDER = regex.compile(r"(?<=[\p{Thai}]{10})\s+(?=[\p{Thai}]{10})")
ORDINAL = regex.compile(r"\b\d{1,2}\Z")  # 4. Mai
END = regex.compile(r"[.!?…।؟۔。！？][\"')\]»”’」』）]*\Z")
CODE_MARKS = regex.compile(r"[{}<>=\\|`_*#@~^]|\w\([^\s]|\[\w*\]|://|::|--|->|[\w.]/\w+/|\.\.\.\s*\d")
EMPTY = regex.compile(r"[(（\[]\s*[,;]?\s*[)）\]]|“\s*”|«\s*»|„\s*[“”]|「\s*」|『\s*』|《\s*》|\"\s*\"")
BEFORE_MARK = regex.compile(r"\s+(?=[,;:.!?)）])")
BRACKETS = regex.compile(r"\s*\([^()]*\)")
MARKS_OF_ENDS = " \t,;:.!?…।؟۔。！？"
SHORTEST, LONGEST = 6, 50  # words to search by
PAIRS_IN_A_THAI_WORD = 3
LONGEST_ANSWER = 6  # words


def questions_of(document: Document, num: int, seed: int) -> list[tuple[str, str]]:
    """Return at most `num` questions about a document, each from another sentence, with their answers.

    Deterministic for a seed.
    """
    random_ = random.Random(f"{seed}/{document.id}")
    title, body = _title(document.text)
    language = _language(document.text)
    sentences = list(_sentences(body, language))
    random_.shuffle(sentences)
    questions = list[tuple[str, str]]()
    for sentence in sentences:
        if len(questions) == num:
            break
        plain = MARKS.sub(lambda match: match[1] or "", sentence)
        spans = [span for span in _spans(sentence, plain, language) if _is_answer(span[0], plain, title)]
        if not spans:
            continue
        answer, kind = random_.choice(spans)
        if has_answer(document.text, [answer]):
            questions.append((_question(plain, answer, kind, title, language), answer))
    return questions


def _title(text: str) -> tuple[str, str]:
    """Return a title, which is a short first line that ends no sentence, or "", and the rest of the text."""
    first, _, rest = text.partition("\n")
    is_line = len(first) <= LONGEST_HEADING and not END.search(first.strip())
    if is_line and rest.strip() and not rest.lstrip()[0].islower():  # else the sentence continues
        return first.strip().lstrip("# "), rest
    return "", text


def _language(text: str) -> str:
    """Return the language as far as question words need it, "" if neither script nor function words identify it."""
    counts = {name: 0 if text.isascii() else len(regex.findall(letters, text)) for name, letters in SCRIPTS.items()}
    if counts["ja"] * MOST_OF_JAPANESE >= counts["zh"]:
        counts["ja"], counts["zh"] = counts["ja"] + counts["zh"], 0
    counts["latin"] = len(regex.findall(r"\p{Latin}", text))
    script = max(counts, key=lambda name: counts[name])
    if script != "latin":
        return script
    words = regex.findall(r"\p{L}+", text.lower())
    sums = {name: sum(map(words.count, known.split())) for name, known in FUNCTION_WORDS.items()}
    best = max(sums, key=lambda name: sums[name])
    return best if sums[best] * FEWEST_FUNCTION_WORDS >= len(words) else ""


def _sentences(text: str, language: str) -> Iterator[str]:
    """Yield the sentences of prose of a usable length; Thai, which does not mark their ends, is cut at blanks."""
    scale = PAIRS_IN_A_THAI_WORD if language == "th" else 1
    for block in BLOCK.split(FENCE.sub("\n\n", text)):
        prose = " ".join(LEADER.sub("", block).split())
        for sentence in _cut(prose, THAI_BORDER if language == "th" else BORDER):
            is_whole = language == "th" or END.search(sentence)
            if not is_whole or CODE_MARKS.search(MARKS.sub(lambda match: match[1] or "", CODE.sub("", sentence))):
                continue
            if SHORTEST * scale <= len(search_words(sentence)) <= LONGEST * scale:
                yield sentence


def _cut(text: str, border: regex.Pattern[str]) -> Iterator[str]:
    start = 0
    for match in border.finditer(text):
        before = text[max(start, match.start() - 8) : match.start() - 1]
        is_point = text[match.start() - 1] == "."
        if not (is_point and (ABBREVIATION.search(before) or ORDINAL.search(before))):
            yield text[start : match.start()]
            start = match.end()
    yield text[start:].strip()


def _spans(sentence: str, plain: str, language: str) -> list[tuple[str, int]]:
    """Return dates, numbers and names with the places of their question words; numbers in dates do not count."""
    dates = list(DATE.finditer(plain))
    spans = [(match[0], 0) for match in dates]
    for match in NUMBER.finditer(plain):
        if not any(date.start() < match.end() and match.start() < date.end() for date in dates):
            spans.append((match[0], 1))
    spans += [(name, 2) for name in CODE.findall(sentence)]
    spans += [(next(filter(None, match.groups())).strip(), 2) for match in NAMES["quoted"].finditer(plain)]
    by_case = language in BEFORE and language != "ar"
    for match in NAMES["cased" if by_case else "latin"].finditer(plain):
        around = plain[max(0, match.start() - 2) : match.start()] + plain[match.end() : match.end() + 2]
        is_noun = language == "de" and " " not in match[0]  # all nouns have capitals there
        if not is_noun and not regex.search(r"\d", around):  # beside a number: a month
            spans.append((match[0], 2))
    return list(dict.fromkeys(spans))


def _is_answer(span: str, sentence: str, title: str) -> bool:
    """Return whether a span is short, stands once in the sentence, and does not overlap the title."""
    words, low = len(search_words(span)), span.lower()
    is_title = bool(title) and (low in title.lower() or title.lower() in low)
    is_short = words <= LONGEST_ANSWER * (3 if regex.search(r"[\p{Thai}\p{Han}\p{Katakana}]", span) else 1)
    return is_short and len(span) > (not span[0].isdigit()) and sentence.lower().count(low) == 1 and not is_title


def _question(sentence: str, answer: str, kind: int, title: str, language: str) -> str:
    word = IN_PLACE[language][kind] if language in IN_PLACE else ""
    rest = sentence.replace(answer, f" {word} " if word else " ", 1).strip(MARKS_OF_ENDS)
    rest = " ".join(BEFORE_MARK.sub("", EMPTY.sub(" ", rest)).split()).strip(MARKS_OF_ENDS)
    named = set(search_words(BRACKETS.sub("", title)))
    is_named = 2 * len(named & set(search_words(rest))) >= len(named)
    parts = [BEFORE[language][kind] if language in BEFORE else "", "" if is_named else f"{title}:", rest]
    return " ".join(part for part in parts if part)
