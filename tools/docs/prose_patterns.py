"""Patterns of sentences that a reader has to read twice, and the score of a sentence."""

from __future__ import annotations

import re

# Name of a pattern -> advice for rewriting a sentence that matches.
ADVICE = {
    "free-relative": 'name the thing instead of writing "what ..." or "who ..."; begin with a verb or a noun',
    "no-referent": 'repeat the noun; avoid "that of", "those" and "others"',
    "agency": "name the client, caller, request or thread; code does not tell, ask, know or want",
    "idiom": "use the technical verb: release, delete, parse, resume, discard, reserve",
    "inversion": 'write subject, verb, object; use "if" for a condition and "when" for a time',
    "fragment": "begin with a noun, and give the unit",
    "ellipsis": "write out the verb and its object",
    "long": "split the sentence: one fact each, at most 25 words",
    "negations": 'state the positive case; avoid "but" in the sense of "except"',
    "pronouns": "replace pronouns by their nouns",
    "empty-words": "use technical nouns and verbs",
    "chaining": "use sentences or a list instead of a chain of colons, semicolons or commas",
}

_BE = r"(?:is|are|was|were|be|been|being)"
_HAVE = r"(?:has|have|had)"

# Pattern name, weight and regular expression. The weights were tuned on labelled sentences.
_PATTERNS: list[tuple[str, float, str]] = [
    # A noun clause such as "what it stores".
    ("free-relative", 2.0, r"^What (?!to\b)"),
    ("free-relative", 1.0, r"^(?:Who|Whom|Whose|Which|Where|How)\b"),
    ("free-relative", 1.5, r"(?<=\w)[,:;]? (?:and |or |but |than |as )?what (?!to\b|if\b)"),
    (
        "free-relative",
        1.5,
        r"\b(?:of|for|from|to|with|by|whom|tells?|told|than|as|and) (?:who|whom|whoever|whatever)\b",
    ),
    (
        "free-relative",
        1.5,
        r"\b(?:all|that|those|nothing|much|everything|anything) (?:that )?there (?:is|are|was|were)\b",
    ),
    ("free-relative", 1.0, r"\ball that (?!are|is)\w+"),
    ("free-relative", 1.0, r"\b(?:whose|which) (?:is|are|they|it|one|ones)\b"),
    # A pronoun without its noun.
    ("no-referent", 1.5, r"\bthose (?:that|who|whose|which|of|with|for|in|from|under|without|it|they|are|were|is)\b"),
    ("no-referent", 1.5, r"\bthat of\b|\b(?:the|a) one(?:s)? (?:of|that|who|whose|before|after|with)\b"),
    (
        "no-referent",
        1.0,
        r"\b(?:of|for|in|by|from|with|to|beside|besides|behind|at|than|as|on) (?:those|that|one|ones|others|"
        r"some|such|these|both|none|all)(?=[,.;:)]|$| (?:is|are|was|were|has|have|as|and|or|in|at|only|too)\b)",
    ),
    ("no-referent", 1.0, r"\bothers'|\bothers\b|\banother('s)?(?=[,.;:)]| (?:is|has|one|of|in|for)\b)"),
    ("no-referent", 1.0, r"\b(?:one|ones|some|none|both|such)(?=[,.;:)]|$)"),
    (
        "no-referent",
        1.0,
        r"^(?:One|Ones|Some|None|Those|That|These|It|They|Others|Such|Both|Nothing) (?:of|that|is|are|was|"
        r"were|has|have|may|can|must|come|comes|goes|go|in|with)\b",
    ),
    (
        "no-referent",
        1.0,
        r"\b(?:if|where|when|unless|until|while|as long as) (?:that|those|one|some|any|none|it) (?:is|are|was|"
        r"were|has|have|goes?|comes?)\b",
    ),
    ("no-referent", 1.0, r"\bfor (?:it|that|them)(?=[,.;:)]|$)"),
    # Words for people, and verbs of speaking and knowing, used for code.
    ("agency", 1.5, r"\b(?:nobody|somebody|everybody|everyone|anybody|whoever|someone|anyone)(?:'s| else)?\b"),
    ("agency", 1.0, rf"\b(?:{_BE}|{_HAVE}|been) (?:\w+ )?(?:told|asked|said|heard|wanted|known)\b"),
    (
        "agency",
        0.5,
        r"\b(?:tells?|told|telling|say(?! so)|says|said|asks?|asking|wants?|knows|hears?|judges?|notices?|"
        r"learns?|waits? for it)\b",
    ),
    # A phrasal verb or set phrase in place of a technical term.
    ("idiom", 1.5, r"\b(?:comes?|came|coming) (?:to|of|about|into|beneath)\b"),
    ("idiom", 1.5, r"\b(?:go|goes|went|gone|going) (?:on|for|back|by|past|without|in|out|to|there|beyond|with)\b"),
    ("idiom", 1.5, r"\b(?:become|becomes|became|made|makes?|making) (?:\w+ )?of\b"),
    (
        "idiom",
        1.0,
        r"\b(?:tak(?:e|es|en|ing)|took) (?:in|back|over|up|apart)\b|\b(?:giv(?:e|es|en|ing)|gave) (?:out|up|"
        r"back|away|way)\b",
    ),
    ("idiom", 1.5, r"\blet(?:s|ting)? (?:go|in|out)\b|\bsees? to\b|\bstands? for\b|\blook(?:s|ed|ing)? (?:at|after)\b"),
    (
        "idiom",
        1.5,
        r"\bin company\b|\bat hand\b|\bof no (?:use|account|more)\b|\bin vain\b|\bas such\b|\bas ever\b|"
        r"\banew\b|\bby far\b|\bfor want of\b|\bin its turn\b|\bto be had\b|\bbeneath\b|\bmeanwhile\b|"
        r"\blikewise\b|\bof its kind\b",
    ),
    ("idiom", 1.0, r"\bas (?:it|they|that|those) (?:is|are|was|were|do|does|did|comes?|goes)\b|\bas if\b"),
    ("idiom", 1.0, r"\bbesides?\b|\bin turns?\b|\bby now\b|\bnow and then\b|\bnever yet\b|\bno (?:more|longer) than\b"),
    ("idiom", 1.0, r"\b(?:so|as) (?:many|much|few|long|far|large|often)\b"),
    ("idiom", 1.5, rf"\b{_BE} (?:not )?(?:to be|for|of|as|to (?!be)\w+)\b(?! (?:shape|type|size|length|the form|\[))"),
    ("idiom", 1.0, r"\bthere (?:is|are|was|were)(?: none| nothing| no| not|[,.;:]|$)"),
    (
        "idiom",
        1.0,
        r"\bunder way\b|\bat once\b|\bone after the other\b|\bof so many\b|\bis left\b|\b(?:has|have) (?:left|"
        r"begun|ended|it|them|one)\b|\bnone for\b",
    ),
    ("no-referent", 1.0, r"\bof (?:it|them)(?=[,.;:)]|$)"),
    # Inverted word order, and connectives that lead to it.
    ("inversion", 2.0, r"^(?:Of|To|Nor|Else|Not|So) "),
    ("inversion", 1.5, r"^(?:But|Only|Or|And|Also|Yet|Likewise|Neither) "),
    (
        "inversion",
        1.0,
        r"^(?:Where|With|Over|Beside|Beyond|Without|From|By|Under|Within|After|Before|Once|For) [^,]{3,60}, ",
    ),
    (
        "inversion",
        1.0,
        r"[,;] where\b|\bwhere (?:it|they|there|that|nothing|none|no|some|this|one|all)\b|\bwhere not\b",
    ),
    ("inversion", 1.5, r"\b(?:of|by|to|from|in|for|at|with|on|under|after|before|behind) (?:which|whom)\b"),
    ("inversion", 1.0, r", (?:for|that|whose|since|else|nor) (?!example|instance)"),
    ("inversion", 1.5, r"[,;:] of (?:a|an|the|those|them|one|each|all|some|it|its|\w+s)\b"),
    ("inversion", 1.0, r"\b(?:should|were|had) (?:it|they|there)\b"),
    (
        "inversion",
        1.5,
        r"\b(?:all|nothing|none|anything|everything|every \w+|no \w+|any \w+|ever\w*) but\b|\bbut (?:for|that|"
        r"those|what|one|not|no|in|its?)\b",
    ),
    ("inversion", 1.0, r"\belse\b|\bnot yet\b|\bno (?:more|longer)\b|\bany more\b"),
    # An item or comment that begins with a preposition or conjunction.
    (
        "fragment",
        2.5,
        r"^(?:of|by|as|under|for(?! each)|to|whose|that|what|where|which|who|from|with|in|on|at|beside|below|"
        r"above|so|else|nor|than|it|they|those|one (?:of|that)|some (?:of|that)|none|likewise|maybe|also|"
        r"until|when|because|but|and|or) ",
    ),
    # A verb without its object, or an auxiliary verb alone.
    (
        "ellipsis",
        1.0,
        rf"\b(?:{_HAVE}|{_BE}|do|does|did|can|may|will|would|could) (?:not|so|it|one|some|none|"
        r"likewise)(?=[,.;:)]|$)",
    ),
    ("ellipsis", 1.0, r"\b(?:is|are|has|have|was|does|do|can|may|takes?|gives?|needs?|wants?|were)(?=[,.;:)]|$)"),
    (
        "ellipsis",
        1.0,
        r"\b(?:the same|likewise|the like|the rest|the others?|the other way|the latter|the former)(?=[,.;:)]|"
        r"$)",
    ),
]
PATTERNS = [(name, weight, re.compile(pattern)) for name, weight, pattern in _PATTERNS]

_NEGATION = re.compile(r"\b(?:not|no|none|nothing|nobody|never|neither|nor|without|cannot|nowhere)\b|n't\b", re.I)
_PRONOUN = re.compile(
    r"\b(?:it|its|itself|they|them|their|this|that|those|these|one|ones|others?|some|such|both|each|none|nothing|"
    r"anything|everything|all|what|who|whom|whose|which|whoever|nobody|somebody|here|there|so|then|another)\b",
    re.I,
)
_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*|X\d*")
# Words without technical content: function words, and general verbs that mean nothing without their noun.
_EMPTY = """
a about above after again against ago ahead all almost alone along already also although always am among an and
another any anything are around as aside ask asked asks at away back be because become becomes been before begin
begins began begun behind being below beside besides best better between beyond both but by came can cannot come comes
coming could did do does doing done down during each either else end ended ends enough even ever every everything
except far few fewer find finds first follow following follows for found from further gave get gets give given gives
go goes going gone good got had hardly has have having he held help her here him his hold holds how however i if in
indeed instead into is it its itself just keep keeps kept kind kinds knew know known knows last late later latter
least leave leaves left less let lets like likely long longer look looks lot made make makes many may maybe me mean
means meanwhile might more most much must my near nearly need needs neither never next no nobody none nor not nothing
now of off often on once one ones only onto or other others otherwise ought our ours out over own part parts per
perhaps place places possible put rather right said same saw say says see seen sees set sets shall she should show
shows since so some somebody something sometimes soon stand stands stay stays still such take taken takes taking tell
tells than that the their them then there these they thing things this those though through thus till time times to
together told too took toward true try turn turns under until unless up upon us use used usually very want wanted
wants was way ways we well went were what whatever when whenever where wherever whether which while who whoever whole
whom whose why will with within without word words work would yes yet you your anew likewise
"""
_EMPTY_WORDS = frozenset(_EMPTY.split())


def measure(text: str) -> list[tuple[str, float]]:
    """Return the patterns that depend on a whole sentence, with their weights, e.g. ``[("long", 1.0)]``.

    These are its length, and its numbers of negations, pronouns, words without technical content, commas and colons.
    A weight below 0 is a bonus.
    """
    found: list[tuple[str, float]] = []
    words = _WORD.findall(text)
    if not words:
        return found
    if len(words) > 40:
        found.append(("long", 2.0))
    elif len(words) > 26:
        found.append(("long", 1.0))
    elif len(words) < 7:
        found.append(("short", -1.0))
    negations = len(_NEGATION.findall(text))
    if negations >= 3:
        found.append(("negations", 1.5))
    elif negations == 2:
        found.append(("negations", 0.5))
    pronouns = len(_PRONOUN.findall(text))
    share = pronouns / len(words)
    if pronouns >= 4 and share > 0.2:
        found.append(("pronouns", 1.0))
    elif pronouns >= 3 and share > 0.14:
        found.append(("pronouns", 0.5))
    empty = sum(word.lower() in _EMPTY_WORDS for word in words) / len(words)
    if len(words) >= 5:
        if empty > 0.76:
            found.append(("empty-words", 2.0))
        elif empty > 0.68:
            found.append(("empty-words", 1.5))
        elif empty > 0.6:
            found.append(("empty-words", 0.5))
        elif empty < 0.42:
            found.append(("content-words", -1.0))
    chained = len(re.findall(r"[;:] ", text))
    if chained >= 2:
        found.append(("chaining", 1.0))
    if text.count(",") >= 4 and len(words) < 45:
        found.append(("chaining", 0.5))
    return found


def score(text: str, *, is_first: bool = False) -> tuple[float, list[str]]:
    """Return the score of a sentence and the names of the patterns that it matches.

    Each pattern name counts at most twice, so that length alone does not flag a long sentence.

    Args:
        text: sentence in which :func:`tools.docs.prose_sentences.plain` has replaced code and links.
        is_first: True for the first sentence of a docstring, comment or paragraph.
    """
    text = re.sub(r"\s+", " ", text).strip()
    found: list[tuple[str, float]] = []
    for name, weight, pattern in PATTERNS:
        matches = len(pattern.findall(text))
        if matches:
            found.append((name, weight * min(matches, 2) ** 0.5))
    found += measure(text)
    if is_first and re.match(r"(?:It|They|That|Those|This one|One|These)\b(?! (?:of|error|file|line|request))", text):
        found.append(("no-referent", 1.0))
    by_name: dict[str, list[float]] = {}
    for name, weight in found:
        by_name.setdefault(name, []).append(weight)
    total = sum(sum(sorted(weights, reverse=True)[:2]) for weights in by_name.values())
    return round(total, 2), [name for name in by_name if sum(by_name[name]) > 0]
