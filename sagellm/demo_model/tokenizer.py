"""A byte-level BPE tokenizer trained on the corpus, with the chat template that the model is trained on."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import Model
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (BOS, EOS, PAD, *ROLES)  # ids 0 to 5 in this order
BYTE_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

# The template writes <|begin|> and the tokenizer never adds it: LMDeploy and the OpenAI route first render the
# template and then tokenize the text with special tokens on, which would double it otherwise.
# Every turn ends with <|end|>, the model's end of sequence; an answer is everything up to it.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] in ['system', 'developer'] -%}{{- '<|system|>' -}}
{%- elif message['role'] in ['user', 'tool'] -%}{{- '<|user|>' -}}
{%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}
{%- else -%}{{- raise_exception(
    'got role ' ~ message['role'] ~ '; allowed are system, developer, user, tool and assistant') -}}
{%- endif -%}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{{- eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_tokens: int) -> "PreTrainedTokenizerFast":
    """Train on `texts`; any text can be encoded afterwards, because every byte is a token.

    Args:
        vocab_size: upper bound of the vocabulary, special tokens included.
        max_tokens: the model's context, stored as `model_max_length`.
    """
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer, max_tokens)


def byte_tokenizer(vocab_size: int, max_tokens: int) -> "PreTrainedTokenizerFast":
    """Encode each byte as one token, without any training.

    Ids above the bytes are words such as ` w300`: no text is encoded to them, but a random model emits them, and
    they decode to something that can be read and compared.
    """
    from tokenizers import models, pre_tokenizers

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [f"\u0120w{index}" for index in range(len(tokens), vocab_size)]  # U+0120 is how byte-level BPE spells " "
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return _wrap(_byte_level(models.BPE(vocab=vocabulary, merges=[])), max_tokens)


def _byte_level(model: "Model") -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wrap(tokenizer: "Tokenizer", max_tokens: int) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_tokens,
        # The other value rewrites " ." and " n't" when decoding: wrong for code, and a warning in some releases.
        clean_up_tokenization_spaces=False,
    )
