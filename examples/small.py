"""Make a small model of random weights in a local folder, as a download would leave it, to try the guides with.

    python examples/small.py llama runs/llama
    python examples/small.py vit runs/vit
    python examples/small.py whisper runs/whisper

Nothing is downloaded: the tokenizer of the Llama is trained on the text of Python's manual, which `texts.txt` in its
folder has, a paragraph a line.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)


def llama(folder: Path) -> None:
    """Write a Llama of two layers, its tokenizer of 512 tokens, and `texts.txt`."""
    paragraphs = bytes(Text.read().train.tolist()).decode().splitlines()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    # Wider than the default, which is for wide models: adapters of a model that says nothing learn nothing.
    config = LlamaConfig(vocab_size=512, **sizes, **heads, bos_token_id=0, eos_token_id=0, initializer_range=0.1)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "texts.txt").write_text("\n".join(paragraphs), encoding="utf-8")


def vit(folder: Path) -> None:
    """Write a vision transformer without a head, for images of 16 x 16 pixels."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    # Wider than the default, which is for wide models.
    ViTModel(ViTConfig(image_size=16, patch_size=4, **sizes, initializer_range=0.1)).save_pretrained(folder)


def whisper(folder: Path) -> None:
    """Write a Whisper for a second of sound, whose tokens are bytes."""
    vocabulary = {byte: place for place, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    tokenizer = WhisperTokenizer(
        vocab={**vocabulary, **{token: 256 + n for n, token in enumerate(special)}}, merges=[], pad_token=special[0]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    WhisperProcessor(WhisperFeatureExtractor(chunk_length=1), tokenizer).save_pretrained(folder)
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=64,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        **layers,
        max_source_positions=50,
        max_target_positions=32,
        decoder_start_token_id=257,
        **{f"{name}_token_id": 256 for name in ("pad", "bos", "eos")},
        suppress_tokens=None,
        begin_suppress_tokens=None,
        init_std=0.1,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config.update(no_timestamps_token_id=260, max_length=32)
    model.save_pretrained(folder)


def main() -> None:
    """Write the model that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("llama", "vit", "whisper"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    {"llama": llama, "vit": vit, "whisper": whisper}[options.kind](options.folder)
    print(f"a small {options.kind} is in {options.folder}")


if __name__ == "__main__":
    main()
