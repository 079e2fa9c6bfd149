"""Token ids of converted GGUF files beside llama.cpp's, on a thousand texts for each kind of tokenizer.

    python -m benchmarks.token_ids --llama PYTHON [--out FILE]

PYTHON is the interpreter of an environment that has llama-cpp-python; `benchmarks/models/README.md` says how to make one.
The vocabulary is that of SmolLM2, cut by the rules of each kind, and for SentencePiece one made of its tokens. The result
holds a hash of all ids of a kind, which a test compares with ours.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.models.gguf_files import add_sentence_pieces, write_vocabulary
from benchmarks.models.texts import LANGUAGES, texts
from benchmarks.output import Output, table, with_output
from sagellm.models import packaged
from sagellm.models.gguf_file import GGUFFile
from sagellm.models.gguf_tokenizer import KINDS, write_tokenizer

LLAMA_CODE = """
import json, sys
import llama_cpp
model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
answer = [model.tokenize(text.encode(), add_bos=False, special=True) for text in json.load(sys.stdin)]
print(json.dumps({"version": llama_cpp.__version__, "ids": answer}))
"""
NUM_PIECES = 12_000  # tokens of SmolLM2 that the vocabulary of SentencePiece's kind is made of


@click.command()
@click.option("--llama", required=True, help="Python interpreter with llama-cpp-python.")
@with_output
def main(llama: str, output: Output) -> None:
    """Compare, print a table, and write the result. Exit code 1: an id differs."""
    rows: dict[str, Any] = {}
    version = ""
    with tempfile.TemporaryDirectory() as scratch:
        for name, file in vocabularies(Path(scratch)):
            ours, asked = our_ids(file)
            run = subprocess.run(
                [llama, "-c", LLAMA_CODE, file], input=json.dumps(asked), capture_output=True, text=True, check=True
            )
            answer = json.loads(run.stdout)
            version = answer["version"]
            different = sum(one != other for one, other in zip(ours, answer["ids"], strict=True))
            ids = sum(map(len, answer["ids"]))
            rows[name] = {"texts": len(asked), "ids": ids, "different": different, "sha256": digest(answer["ids"])}
    cells = [[name, row["texts"], row["ids"], row["different"]] for name, row in rows.items()]
    output.say(table(["tokenizer", "texts", "ids", "texts that differ"], cells))
    output.finish({"llama_cpp_python": version, "tokenizers": rows})
    sys.exit(1 if any(row["different"] for row in rows.values()) else 0)


def vocabularies(folder: Path) -> Iterator[tuple[str, Path]]:
    """Write and yield a GGUF file without layers for each kind of tokenizer."""
    source = GGUFFile(packaged.packaged_file())
    tokens, merges = source.need("tokenizer.ggml.tokens"), source.need("tokenizer.ggml.merges")
    types = source.need("tokenizer.ggml.token_type")

    def add_byte_level(pre: str, writer: Any) -> int:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        return len(tokens)

    for pre in KINDS:
        file = folder / f"{pre}.gguf"
        write_vocabulary(file, partial(add_byte_level, pre))
        yield pre, file
    pieces = [piece for piece in map(_text, tokens[:NUM_PIECES]) if piece and "\0" not in piece]
    pieces += dict.fromkeys("".join(LANGUAGES).replace(" ", ""))
    for prefix in (True, False):
        file = folder / f"pieces-{prefix}.gguf"
        write_vocabulary(file, lambda writer, prefix=prefix: add_sentence_pieces(writer, pieces, prefix))
        yield f"llama, {'with' if prefix else 'without'} a space in front", file


def our_ids(file: Path) -> tuple[list[list[int]], list[str]]:
    """Return our token ids of the texts, and the texts, with all special tokens of the file in them."""
    from tokenizers import Tokenizer

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(GGUFFile(file), Path(folder), 128)
        tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    special = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values())
    asked = texts(special)
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in asked], asked


def digest(ids: list[list[int]]) -> str:
    """Return the SHA-256 of token ids."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def _text(token: str) -> str | None:
    """Return the text of a byte-level token, with the space of SentencePiece, or None if it is no whole text."""
    try:
        return bytes(_BYTES[letter] for letter in token).decode().replace(" ", "▁")
    except (KeyError, UnicodeDecodeError):
        return None


def _letters() -> dict[str, int]:
    """Map the letters of byte-level BPE to bytes (GPT-2's `bytes_to_unicode`)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_BYTES = _letters()

if __name__ == "__main__":
    main()
