"""The prompts whose greedy continuations `record_transformers.py` records.

`PROMPTS` maps a name to the text given to the tokenizer, `CHATS` holds the messages behind the chat prompts,
and `TOKEN_COUNTS` the lengths that are chosen on purpose: one token, both sides of a page of 16, and a
length of many pages. All texts were written for this file; the two long ones are put together from parts
with a seed.
"""

import random
from collections.abc import Sequence


def prose(rng: random.Random, num_sentences: int) -> str:
    """Paragraphs of a harbour's log book, put together from parts."""

    def pick(options: Sequence[str]) -> str:
        return options[int(rng.random() * len(options))]

    who = ("the harbour master", "an old pilot", "Ines", "the cook's daughter", "a surveyor from the north",
           "Tobias", "the lighthouse keeper", "one of the twins", "the ferry's engineer")  # fmt: skip
    did = ("counted", "repaired", "forgot about", "painted", "sold", "carried home", "argued over",
           "measured", "quietly replaced", "made a drawing of")  # fmt: skip
    what = ("the broken tide gauge", "three crates of lemons", "a brass compass", "the long mooring rope",
            "seven blue lanterns", "the map of the eastern shoals", "a barrel of lamp oil", "the bell",
            "two pairs of oars", "a letter nobody had opened")  # fmt: skip
    when = ("before the fog lifted", "while the kettle boiled", "on the second Tuesday of March",
            "as the last boat came in", "although the wind had turned", "because the paint was still wet",
            "some hours after midnight", "when no one was watching")  # fmt: skip
    then = ("It took longer than anyone had expected", "Nobody complained",
            "The price was written on the back of a chart", "By evening the work was done",
            "This was, of course, against the rules", "The gulls were not impressed",
            "A second opinion was asked for, and ignored")  # fmt: skip
    paragraphs: list[str] = []
    sentences: list[str] = []
    for index in range(num_sentences):
        subject, clause = pick(who), pick(when)
        form = int(rng.random() * 4)
        if form == 0:
            sentence = f"{subject} {pick(did)} {pick(what)} {clause}."
        elif form == 1:
            sentence = f"{clause}, {subject} {pick(did)} {pick(what)} and {pick(did)} {pick(what)}."
        elif form == 2:
            sentence = f"{pick(then)}: {subject} {pick(did)} {pick(what)}, {clause}."
        else:
            sentence = f'"did you know that {pick(who)} {pick(did)} {pick(what)}?" asked {subject}. {pick(then)}.'
        start = 1 if sentence[0] == '"' else 0
        sentences.append(sentence[:start] + sentence[start].upper() + sentence[start + 1 :])
        if len(sentences) == 5 or index == num_sentences - 1:
            paragraphs.append(" ".join(sentences))
            sentences = []
    return "\n\n".join(paragraphs)


def code(rng: random.Random, num_functions: int) -> str:
    """A Python module of small functions, put together from parts."""
    nouns = ("crate", "lantern", "tide", "rope", "ticket", "sail", "chart", "berth")
    lines = ['"""Accounts of the harbour."""', "", "from dataclasses import dataclass", ""]
    for index in range(num_functions):
        noun, other = (nouns[int(rng.random() * len(nouns))] for _ in range(2))
        limit, step = int(rng.random() * 900) + 100, int(rng.random() * 8) + 2
        form = index % 3
        if form == 0:
            lines += ["", "@dataclass(frozen=True)", f"class {noun.title()}{other.title()}{index}:",
                      f"    {noun}_id: int", f"    weight: float = {limit / 8}", "",
                      "    def is_heavy(self) -> bool:",
                      f"        return self.weight > {step}.5", ""]  # fmt: skip
        elif form == 1:
            lines += ["", f"def count_{noun}s_{index}(values: list[int]) -> int:",
                      f"    # A {noun} below {limit} belongs to the {other}.", "    total = 0",
                      "    for value in values:", f"        if value % {step} == 0 and value < {limit}:",
                      f"            total += value // {step}", "    return total", ""]  # fmt: skip
        else:
            lines += ["", f"def name_{noun}_{index}(name: str, *, width: int = {step}) -> str:",
                      "    if not name:", f'        raise ValueError("no {other} without a {noun}")',
                      f'    return f"{{name:>{{width}}}}-{limit:04d}"', ""]  # fmt: skip
    return "\n".join(lines)


def _long_prose() -> str:
    text = prose(random.Random(7), 33)
    return text[: text.rindex(" ")]


def _long_mixed() -> str:
    rng = random.Random(15)
    text = "\n\n".join((prose(rng, 20), code(rng, 7), prose(rng, 60)))
    return text[:6072]


CHATS: dict[str, list[dict[str, str]]] = {
    "chat_one_turn": [
        {"role": "user", "content": "Why do leaves change colour in autumn? Answer in two sentences."},
    ],
    "chat_three_turns": [
        {"role": "system", "content": "You are a patient librarian who recommends one book at a time."},
        {"role": "user", "content": "I liked stories about the sea. What should I look for next?"},
        {"role": "assistant", "content": "Try a book of letters written by lighthouse keepers."},
        {"role": "user", "content": "I have read it already. Something shorter, please!"},
    ],
}

PROMPTS: dict[str, str] = {
    "one_token": "The",
    "tokens_15": "A small boat left the harbour at dawn, carrying only salt and three letters",
    "tokens_16": "A small boat left the harbour at dawn, carrying only salt and three letters from",
    "tokens_17": "A small boat left the harbour at dawn, carrying only salt and three letters from home",
    "prose": (
        "The museum had closed for the winter, but Marta still came every morning to wind the clocks. There "
        "were forty-one of them, and no two agreed about the time. She had once tried to correct them all in "
        "a single day; by the evening, the first had already drifted away from the last. Since then she has"
    ),
    "python": (
        "def merge_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:\n"
        '    """Join the intervals that overlap, in ascending order."""\n'
        "    merged: list[tuple[int, int]] = []\n"
        "    for start, end in sorted(intervals):\n"
        "        if merged and start <= merged[-1][1]:\n"
        "            merged[-1] = (merged[-1][0], max(merged[-1][1], end))\n"
        "        else:\n"
    ),
    "digits": (
        "12 + 30 = 42\n7 * 8 = 56\n1024 / 16 = 64\n3.14159 * 2 = 6.28318\n"
        "   7    14   21\n  70   140  210\n 700  1400 2100\n7000"
    ),
    "chinese": "春天来了，山上的雪慢慢融化，河水又开始流动。孩子们在桥边放风筝，老人坐在树下喝茶。",
    "arabic": ("في الصباح الباكر فتح التاجر دكانه الصغير قرب الميناء، وبدأ يرتب الأقمشة الملونة على الرفوف."),
    "cyrillic": ("Каждое утро старый почтальон проходил через весь город пешком и знал по имени каждую собаку."),
    "hindi": "गाँव के पास एक छोटी नदी बहती है। बच्चे शाम को वहाँ खेलते हैं और",
    "emoji": (
        "Mon ☀️, Tue ⛅, Wed 🌧️🌧️, Thu ⛈️, Fri 🌈! Party on Saturday 🎉👩\u200d👩\u200d👧\u200d👦🇪🇺. "
        "Hi everyone 👋, please remember to bring"
    ),
    "chat_one_turn": (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
        "Why do leaves change colour in autumn? Answer in two sentences.<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "chat_three_turns": (
        "<|im_start|>system\n"
        "You are a patient librarian who recommends one book at a time.<|im_end|>\n"
        "<|im_start|>user\n"
        "I liked stories about the sea. What should I look for next?<|im_end|>\n"
        "<|im_start|>assistant\n"
        "Try a book of letters written by lighthouse keepers.<|im_end|>\n"
        "<|im_start|>user\n"
        "I have read it already. Something shorter, please!<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "long_prose": _long_prose(),
    "long_mixed": _long_mixed(),
}

TOKEN_COUNTS: dict[str, int] = {
    "one_token": 1,
    "tokens_15": 15,
    "tokens_16": 16,
    "tokens_17": 17,
    "long_mixed": 1500,
}
