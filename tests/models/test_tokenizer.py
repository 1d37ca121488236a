"""The tokenizer: SmolLM2's own, tiny ones in both formats, streaming, chat templates."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import given
from tokenizers import decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from models.tokenizer import Tokenizer
from models.weights.gguf_file import GGUFFile

SETTINGS = hypothesis.settings(deadline=None, max_examples=200)
# SmolLM2's vocabulary lacks the bytes of six control characters and of the planes 4 to 11 (unassigned).
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF))
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile.open(smollm2_path).metadata)


@pytest.fixture
def tiny_metadata(tiny, tmp_path) -> dict:
    return GGUFFile.open(tiny.write_gguf(tmp_path / "tokenizer.gguf")).metadata


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    return pieces, stream.finish()


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# SmolLM2


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("def f(x):\n    return x ** 2\n", None),
        ("2024", [34, 32, 34, 36]),  # digits one by one
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
        ("héllo 日本語 🎉 ½", None),
        ("", []),
    ],
)
def test_smollm2_encode(smollm2, text, ids):
    found = smollm2.encode(text)
    assert ids is None or found == ids
    assert smollm2.decode(found) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_smollm2_ends_at_im_end(smollm2):
    assert smollm2.eos_ids == {2}


@SETTINGS
@given(text=TEXTS)
def test_smollm2_round_trip(smollm2, text):
    hypothesis.assume("<" not in text)
    assert smollm2.decode(smollm2.encode(text)) == text


@SETTINGS
@given(text=TEXTS)
def test_streaming_text(smollm2, text):
    ids = smollm2.encode(text)
    pieces, rest = streamed(smollm2, ids)
    assert "".join(pieces) + rest == smollm2.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
        assert rest == ""


@SETTINGS
@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300), st.integers(127, 192)), max_size=24))
def test_streaming_any_tokens(smollm2, ids):
    """Random tokens are mostly pieces of characters, in no sensible order, among special tokens."""
    pieces, rest = streamed(smollm2, ids)
    assert "".join(pieces) + rest == smollm2.decode(ids)


def test_streaming_holds_back_part_of_a_character(smollm2):
    ids = smollm2.encode("a🎉")
    pieces, rest = streamed(smollm2, ids)
    assert (pieces[0], pieces[-1], rest) == ("a", "🎉", "")
    assert not any(pieces[1:-1])
    pieces, rest = streamed(smollm2, ids[:-1])
    assert ("".join(pieces), rest) == ("a", "\ufffd")


def test_smollm2_chat_template(smollm2):
    assert smollm2.apply_chat_template(MESSAGES) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert smollm2.apply_chat_template(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


# GGUF


def test_both_formats_agree(tiny, tmp_path, tiny_metadata):
    folder = Tokenizer.from_folder(tiny.write_folder(tmp_path / "hf"))
    file = Tokenizer.from_gguf(tiny_metadata)
    for text in ("hello 123 wörld", "<s>hello<|end|>", "a  b\n\n c"):
        assert folder.encode(text) == file.encode(text)
    assert folder.eos_ids == file.eos_ids == {0, 2}
    assert folder.apply_chat_template(MESSAGES) == file.apply_chat_template(MESSAGES)


def test_gguf_first_token(tiny_metadata):
    plain = Tokenizer.from_gguf(tiny_metadata).encode("hello")
    tokenizer = Tokenizer.from_gguf(tiny_metadata | {"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("hello") == [1, *plain]
    assert tokenizer.encode("<s>hello") == [1, *plain]  # as chat templates write it: not twice
    assert tokenizer.encode("") == [1]
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_first_token_unknown(tiny_metadata):
    del tiny_metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ValueError, match=r"add_bos_token.*but bos_token is None"):
        Tokenizer.from_gguf(tiny_metadata | {"tokenizer.ggml.add_bos_token": True})


def test_gguf_user_defined_tokens_are_recognised_and_kept(tiny_metadata):
    tiny_metadata["tokenizer.ggml.tokens"].append("<tool call>")
    tiny_metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = Tokenizer.from_gguf(tiny_metadata)
    ids = tokenizer.encode("a<tool call>b")
    assert len(ids) == 3
    assert ids[1] == 262
    assert tokenizer.decode(ids) == "a<tool call>b"


def test_gguf_qwen2(tiny_metadata):
    """The split of Qwen2's tokenizer.json, and its normal form: merges never reach across it."""
    tokens = tiny_metadata["tokenizer.ggml.tokens"]
    space, two, e_acute = "\u0120", "1", "\u00c3\u00a9"  # byte-level spellings
    tokens += [space + "h", two + two, space + two, e_acute]
    tiny_metadata["tokenizer.ggml.merges"] += [f"{space} h", f"{two} {two}", f"{space} {two}", "\u00c3 \u00a9"]
    tokenizer = Tokenizer.from_gguf(tiny_metadata | {"tokenizer.ggml.pre": "qwen2"})

    def pieces(text):
        return [tokens[token] for token in tokenizer.encode(text)]

    assert pieces(" h") == [space + "h"]
    assert pieces("11") == [two, two]
    assert pieces(" 1") == [space, two]
    assert pieces("e\u0301") == pieces("\u00e9") == [e_acute]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", None, "tokenizer.ggml.tokens must be a list of str, got None"),
        ("tokens", ["a", "a"], "tokenizer.ggml.tokens names a token twice"),
        ("merges", ["h e", "xx y"], "tokenizer.ggml.merges has 'xx y', but 'xx' is not a token"),
        ("merges", [1, 2], "tokenizer.ggml.merges must be a list of str"),
        ("token_type", "normal", "tokenizer.ggml.token_type must be a list of int, got 'normal'"),
        ("eos_token_id", 262, "tokenizer.ggml.eos_token_id must be one of the 262 tokens, got 262"),
        ("add_bos_token", 3, "tokenizer.ggml.add_bos_token must be true or false, got 3"),
    ],
)
def test_damaged_gguf_metadata(tiny_metadata, key, value, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(tiny_metadata | {f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("tokenizer.json", {"model": {"type": "Unknown"}}, "tokenizer.json is not a tokenizer .*get it again"),
        ("tokenizer_config.json", {"bos_token": 5}, "tokenizer_config.json: bos_token must be a string, got 5"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token must be true or false, got 'yes'"),
        ("tokenizer_config.json", {"chat_template": [1]}, "chat_template must be a list of dict"),
        ("config.json", {"eos_token_id": "</s>"}, "config.json: eos_token_id must be a token's number or a list"),
    ],
)
def test_damaged_folder(tiny, tmp_path, file, changes, message):
    folder = tiny.write_folder(tmp_path)
    change_json(folder / file, **changes)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(folder)


def test_gguf_without_types_or_ends(tiny_metadata):
    for key in ("token_type", "eos_token_id", "eot_token_id", "bos_token_id"):
        del tiny_metadata[f"tokenizer.ggml.{key}"]
    tokenizer = Tokenizer.from_gguf(tiny_metadata)
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_pre_tokenizers_split_as_their_models(tiny_metadata):
    """Merges across digits and across a contraction show where each pre-tokenizer cuts."""
    merges = ["1 2", "12 3", "123 4", "' S"]
    tiny_metadata["tokenizer.ggml.tokens"] += [merge.replace(" ", "") for merge in merges]
    tiny_metadata["tokenizer.ggml.token_type"] += [1] * len(merges)
    tiny_metadata["tokenizer.ggml.merges"] += merges
    tokens = tiny_metadata["tokenizer.ggml.tokens"]

    def split(pre, text):
        tokenizer = Tokenizer.from_gguf(tiny_metadata | {"tokenizer.ggml.pre": pre})
        return [tokens[token] for token in tokenizer.encode(text) if token != 1]

    assert split("gpt-2", "1234'S") == ["1234", "'", "S"]  # only 's in lower case is one piece
    assert split("smollm", "1234'S") == ["1", "2", "3", "4", "'", "S"]
    assert split("llama-bpe", "1234'S") == ["123", "4", "'S"]


def test_llama3_adds_its_first_token_and_prefers_whole_tokens(tiny_metadata):
    tiny_metadata["tokenizer.ggml.tokens"].append("xyz")  # a token that no merges lead to
    tiny_metadata["tokenizer.ggml.token_type"].append(1)
    assert len(Tokenizer.from_gguf(tiny_metadata).encode("xyz")) == 3
    assert Tokenizer.from_gguf(tiny_metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("xyz") == [1, 262]


@pytest.mark.parametrize(
    ("key", "value", "supported"),
    [("model", "llama", "gpt2"), ("pre", "viking", "gpt-2, smollm, llama-bpe, qwen2"), ("pre", "default", "gpt-2")],
)
def test_other_gguf_tokenizers(tiny_metadata, key, value, supported):
    message = rf"tokenizer.ggml.{key} = '{value}' is not supported; supported: {supported}.*tokenizer.json"
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(tiny_metadata | {f"tokenizer.ggml.{key}": value})


# Hugging Face folders


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json; .*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_folder_with_tokenizer_only(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path)
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_folder_first_token(tiny, tmp_path):
    """The post-processor adds it, unless tokenizer_config.json decides."""
    folder = tiny.write_folder(tmp_path)
    plain = Tokenizer.from_folder(folder).encode("hello")
    change_json(folder / "tokenizer_config.json", add_bos_token=True)
    assert Tokenizer.from_folder(folder).encode("hello") == [1, *plain]
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.save(str(folder / "tokenizer.json"))
    change_json(folder / "tokenizer_config.json", add_bos_token=None)
    assert Tokenizer.from_folder(folder).encode("hello") == [1, *plain]
    change_json(folder / "tokenizer_config.json", add_bos_token=False)
    assert Tokenizer.from_folder(folder).encode("hello") == plain


def test_folder_truncation_and_padding_are_off(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=16)
    inner.save(str(folder / "tokenizer.json"))
    assert len(Tokenizer.from_folder(folder).encode("x" * 9)) == 9


def test_folder_ends(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path)
    change_json(folder / "config.json", eos_token_id=None)
    assert Tokenizer.from_folder(folder).eos_ids == {0}
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert Tokenizer.from_folder(folder).eos_ids == {0, 2}


def test_chat_template_file_wins(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path)
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES) == "<s>[user] Hi<|end|>[assistant]"
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES) == "from the file"


def test_named_chat_templates(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path)
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    change_json(folder / "tokenizer_config.json", chat_template=named)
    assert Tokenizer.from_folder(folder).apply_chat_template(MESSAGES) == "yes"


# Chat templates


def with_template(metadata, template):
    return Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": template})


def test_template_environment(tiny_metadata):
    template = """
    {%- for m in messages %}
        {%- if loop.index > 1 %}{% break %}{% endif %}
{{ m | tojson }}
    {% endfor %}
{{ strftime_now("%Y") | length }}"""
    tokenizer = with_template(tiny_metadata, template)
    messages = [{"role": "user", "content": "<é>"}] * 2
    assert tokenizer.apply_chat_template(messages) == '{"role": "user", "content": "<é>"}\n4'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template failed .*roles must alternate"),
        ("{% if %}", "chat template failed"),
        ("{{ messages.append(1) }}", "chat template failed .*append"),
        ("{{ ''.__class__.__mro__ }}", "chat template failed .*unsafe"),
    ],
)
def test_templates_that_fail(tiny_metadata, template, message):
    with pytest.raises(ValueError, match=message):
        with_template(tiny_metadata, template).apply_chat_template(MESSAGES)


def test_no_template(tiny_metadata):
    with pytest.raises(ValueError, match="has no chat template"):
        with_template(tiny_metadata, None).apply_chat_template(MESSAGES)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {"content": "Hi"}])
def test_malformed_messages(smollm2, message):
    with pytest.raises(ValueError, match=r"messages\[1\] must have strings for 'role' and 'content'"):
        smollm2.apply_chat_template([*MESSAGES, message])


# Byte fallback (SentencePiece tokenizers of Hugging Face folders)


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b"]
    vocab = {token: index for index, token in enumerate(tokens)}
    inner = tokenizers.Tokenizer(BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    inner.add_special_tokens(["<unk>"])
    return Tokenizer(inner, add_bos=False, bos_token=None, eos_token=None, eos_ids=frozenset(), chat_template=None)


@SETTINGS
@given(text=st.text(max_size=12))
def test_streaming_with_byte_fallback(fallback, text):
    ids = fallback.encode(text)
    pieces, rest = streamed(fallback, ids)
    assert "".join(pieces) + rest == fallback.decode(ids)


@SETTINGS
@given(ids=st.lists(st.integers(0, 259), max_size=12))
def test_invalid_bytes_with_byte_fallback_do_not_stop_the_stream(fallback, ids):
    pieces, rest = streamed(fallback, [*ids, 259, 259])
    assert ("".join(pieces) + rest).endswith("bb")


def test_invalid_byte_after_a_character(fallback):
    ids = [1 + 0xC3, 1 + 0xA9, 1 + 0xFF, 259]
    assert streamed(fallback, ids) == (["", "é", "", "\ufffdb"], "")
