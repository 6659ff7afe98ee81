"""A tokenizer for the tiny models: every text over ten letters is tokens of two letters each."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_models import VOCABULARY

# Each role begins with a token of its own.
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ 'aj' if message['role'] == 'user' else 'bj' }}{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}bj{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """It has the tiny models' vocabulary and special tokens, and a chat template."""
    letters = "abcdefghij"
    words = ["<pad>", "<bos>", "<eos>"] + [a + b for a in letters for b in letters]
    vocabulary = {word: index for index, word in enumerate(words[:VOCABULARY])}
    core = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(".."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=_TEMPLATE,
    )
