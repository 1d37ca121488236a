"""Text to token ids and back, for the tokenizers of Hugging Face folders and of GGUF files."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from models.fields import Fields

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_GGUF_IDS = ("bos", "eos", "eot")
_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer:
    """A tokenizer and what a model's files say about its use.

    Attributes:
      eos_ids: the tokens that end a text.
    """

    eos_ids: frozenset[int]

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        add_bos: bool,
        bos_token: str | None,
        eos_token: str | None,
        eos_ids: frozenset[int],
        chat_template: str | None,
    ) -> None:
        bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
        if add_bos and bos_id is None:
            raise ValueError(
                f"the files ask for a first token (add_bos_token), but bos_token is {bos_token!r}, "
                "which is not in the vocabulary; correct tokenizer_config.json or the GGUF file's metadata"
            )
        self._tokenizer = tokenizer
        self._bos_ids = [bos_id] if add_bos and bos_id is not None else []
        self._special_tokens = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._chat_template = chat_template
        self.eos_ids = eos_ids

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads a Hugging Face folder.

        tokenizer.json must be there. tokenizer_config.json gives the special tokens and the chat template (a
        file chat_template.jinja goes before it); generation_config.json and config.json give further tokens
        that end a text. The first token is added if tokenizer_config.json's add_bos_token says so or, where
        it says nothing, if tokenizer.json's post-processor adds it.

        Raises:
          FileNotFoundError: there is no tokenizer.json.
          ValueError: one of the files is damaged.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json; other tokenizer files are not supported "
                "(transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes it)"
            )
        tokenizer = _read_tokenizer(path)
        config = _fields(folder / "tokenizer_config.json")
        try:
            bos_token, eos_token = (_token_text(config, name) for name in ("bos_token", "eos_token"))
            chat_template = _default_template(config)
            first = tokenizer.encode("").ids[:1]
            adds_bos = bos_token is not None and first == [tokenizer.token_to_id(bos_token)]
            add_bos = config.flag("add_bos_token", adds_bos)
        except ValueError as error:
            raise ValueError(f"{folder / 'tokenizer_config.json'}: {error}") from error
        eos_ids = {None if eos_token is None else tokenizer.token_to_id(eos_token)}
        for name in ("generation_config.json", "config.json"):
            eos_ids |= set(_end_ids(folder / name))
        template_file = folder / "chat_template.jinja"
        return cls(
            tokenizer,
            add_bos=add_bos,
            bos_token=bos_token,
            eos_token=eos_token,
            eos_ids=frozenset(token for token in eos_ids if token is not None),
            chat_template=template_file.read_text(encoding="utf-8") if template_file.is_file() else chat_template,
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> "Tokenizer":
        """Builds a byte-level BPE tokenizer from the metadata of a GGUF file.

        Args:
          metadata: the "tokenizer.*" keys (see `models.weights.gguf_file.GGUFFile`).

        Raises:
          ValueError: the file holds another kind of tokenizer, an unknown pre-tokenizer, or is damaged.
        """
        keys = Fields(metadata)
        kind, pre = keys.get("tokenizer.ggml.model"), keys.get("tokenizer.ggml.pre")
        if kind != "gpt2":
            _refuse("tokenizer.ggml.model", kind, ["gpt2"])
        known = _gguf_pre_tokenizers()
        if pre not in known:
            _refuse("tokenizer.ggml.pre", pre, list(known))
        tokens = keys.items("tokenizer.ggml.tokens", str)
        is_llama3 = pre == "llama-bpe"
        vocab = {token: index for index, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise ValueError("tokenizer.ggml.tokens names a token twice; the file is damaged")
        merges = _merges(keys.items("tokenizer.ggml.merges", str), vocab)
        tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
        tokenizer.pre_tokenizer = known[pre]
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
        typed = list(zip(tokens, keys.items("tokenizer.ggml.token_type", int, []), strict=False))
        tokenizer.add_special_tokens(
            [AddedToken(token, normalized=False, special=True) for token, kind in typed if kind == _CONTROL]
        )
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == _USER_DEFINED])
        ids: list[int | None] = []
        for name in _GGUF_IDS:
            key = f"tokenizer.ggml.{name}_token_id"
            ids.append(None if keys.get(key) is None else keys.integer(key))
            if ids[-1] is not None and not 0 <= ids[-1] < len(tokens):
                raise ValueError(f"{key} must be one of the {len(tokens)} tokens, got {ids[-1]}")
        bos_id, eos_id, eot_id = ids
        return cls(
            tokenizer,
            add_bos=keys.flag("tokenizer.ggml.add_bos_token", is_llama3),
            bos_token=None if bos_id is None else tokens[bos_id],
            eos_token=None if eos_id is None else tokens[eos_id],
            eos_ids=frozenset(token for token in (eos_id, eot_id) if token is not None),
            chat_template=keys.text("tokenizer.chat_template"),
        )

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows, added ones included; ids are below it unless the vocabulary has gaps."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised.

        The model's first token (bos) is put before it if the model's files ask for one and the text does not
        start with it, as the texts of many chat templates do.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids if ids[: len(self._bos_ids)] == self._bos_ids else self._bos_ids + ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> "TextStream":
        """A decoder for tokens that arrive one at a time."""
        return TextStream(self)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, as the model was trained to see it.

        Args:
          messages: each has a "role" ("system", "user", "assistant") and a "content".
          add_generation_prompt: end with the header of the assistant's next answer.

        Raises:
          ValueError: the model has no chat template, a message is malformed, or the template refuses.
        """
        for index, message in enumerate(messages):
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ValueError(f"messages[{index}] must have strings for 'role' and 'content', got {dict(message)!r}")
        try:
            return self._compiled_template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ArithmeticError) as error:
            raise ValueError(f"the model's chat template failed on these messages: {error}") from error

    @cached_property
    def _compiled_template(self) -> jinja2.Template:
        if self._chat_template is None:
            raise ValueError("this model has no chat template (a base model, perhaps); encode the prompt as plain text")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self._chat_template)


class TextStream:
    """Decodes tokens as they arrive; the pieces and `finish()` join to `Tokenizer.decode` of all tokens.

    A piece never ends inside a character: bytes wait for the rest of theirs. (SentencePiece tokenizers with
    byte fallback decode an invalid byte by changing the text before it; there, and only there, pieces already
    given stay as they were. `tokenizers.decoders.DecodeStream` raises in that case.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._ids: list[int] = []  # the tokens of the last piece, then those that wait
        self._num_given = 0  # how many belong to the last piece
        self._given = ""  # their text; they are decoded again, since decoders treat a first token apart

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is now certain, perhaps ""."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or text == self._given:
            return ""
        return self._take(text)

    def finish(self) -> str:
        """The rest of the text; U+FFFD stands for a character that stayed incomplete."""
        return self._take(self._decode(self._ids))

    def _take(self, text: str) -> str:
        waiting = self._ids[self._num_given :]
        continues = text.startswith(self._given)
        piece = text[len(self._given) :] if continues else self._decode(waiting)
        self._ids, self._num_given, self._given = waiting, len(waiting), self._decode(waiting)
        return piece


def _gguf_pre_tokenizers() -> dict[str, pre_tokenizers.PreTokenizer]:
    """By the value of tokenizer.ggml.pre; "default" is not here, as it marks an unknown tokenizer."""
    return {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
        "llama-bpe": _split(digits=3),
        "qwen2": _split(digits=1),
    }


def _split(digits: int) -> pre_tokenizers.PreTokenizer:
    """Words with the sign before them, numbers of at most `digits` digits, other signs, line ends, spaces."""
    pattern = _SPLIT.replace("DIGITS", f"{{1,{digits}}}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _refuse(key: str, value: object, supported: list[str]) -> NoReturn:
    raise ValueError(
        f"{key} = {value!r} is not supported; supported: {', '.join(supported)}. "
        "Use the model's Hugging Face folder instead, with its tokenizer.json"
    )


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    Fields.read(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode("")
    except Exception as error:  # tokenizers raises nothing more specific
        raise ValueError(f"{path} is not a tokenizer ({error}); get it again") from error
    return tokenizer


def _merges(texts: list[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for text in texts:
        first, _, second = text.partition(" ")
        for token in (first, second, first + second):
            if token not in vocab:
                raise ValueError(
                    f"tokenizer.ggml.merges has {text!r}, but {token!r} is not a token; the file is damaged"
                )
        merges.append((first, second))
    return merges


def _fields(path: Path) -> Fields:
    return Fields.read(path) if path.is_file() else Fields({})


def _end_ids(path: Path) -> list[int]:
    ids = _fields(path).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(type(token) is int for token in ids):
        raise ValueError(f"{path}: eos_token_id must be a token's number or a list of them, got {ids}")
    return ids


def _token_text(config: Fields, name: str) -> str | None:
    token = config.get(name)
    return Fields(token).text("content") if isinstance(token, dict) else config.text(name)


def _default_template(config: Fields) -> str | None:
    if not isinstance(config.get("chat_template"), list):
        return config.text("chat_template")
    named = [Fields(entry) for entry in config.items("chat_template", dict)]
    return {entry.text("name"): entry.text("template") for entry in named}.get("default")


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
