"""Fine-tune a Whisper from a local folder on sound that is made: tones, to be written down as the names of notes.

    python examples/small.py whisper runs/whisper
    torchrun --standalone --nproc-per-node 2 examples/speech.py --model runs/whisper

`--model` is the folder of any Whisper with its processor. Needs shard-whisper.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import WhisperForConditionalGeneration, WhisperProcessor

import shardcore

NOTES = {"c": 262, "d": 294, "e": 330, "f": 349, "g": 392, "a": 440, "b": 494}  # hertz
RATE, LENGTH = 16000, 4000  # samples of a second, and of a note


def melody(notes: list[str]) -> torch.Tensor:
    """Return the sound of notes, one after the other, (samples,)."""
    time = torch.arange(LENGTH) / RATE
    return torch.cat([torch.sin(2 * math.pi * NOTES[note] * time) for note in notes])


def main() -> None:
    """Load, train, write down melodies, save, and write them down with what was saved."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with a Whisper and its processor")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/speech"))
    options = parser.parse_args()

    # 1. Each rank reads its part of the weights. tp is the number of all ranks.
    processor = WhisperProcessor.from_pretrained(options.model)
    model = shardcore.from_pretrained(WhisperForConditionalGeneration, options.model, dtype=torch.float32).train()
    shardcore.manual_seed(model, 0)  # of dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[torch.Tensor, list[str]]:
        """Return features (count, mel bins, frames), and what they say."""
        places = torch.randint(len(NOTES), (count, 3), generator=generator)
        melodies = [[list(NOTES)[place] for place in row] for row in places]
        sounds = [melody(notes).numpy() for notes in melodies]
        features = processor.feature_extractor(sounds, sampling_rate=RATE, return_tensors="pt").input_features
        return features.to(model.device), [" ".join(notes) for notes in melodies]

    # 2. The training: every rank draws the same melodies.
    for step in range(1, options.steps + 1):
        features, texts = draw(options.batch)
        ids = processor.tokenizer(texts, padding=True, return_tensors="pt")
        labels = ids.input_ids.masked_fill(ids.attention_mask == 0, -100)[:, 1:]  # the model puts the start before
        loss = model(input_features=features, labels=labels.to(model.device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            say(f"step {step}: loss {loss.item():.4f}")

    # 3. Every rank generates and saves; one writes.
    model.eval()
    features, texts = draw(32)
    written = processor.batch_decode(model.generate(features), skip_special_tokens=True)
    model.save_pretrained(options.output)
    if first():
        processor.save_pretrained(options.output)
        plain = WhisperForConditionalGeneration.from_pretrained(options.output)
        alone = processor.batch_decode(plain.generate(features.cpu()), skip_special_tokens=True)
        say(f"written down right: {sum(a == b for a, b in zip(written, texts, strict=True))} of {len(texts)} melodies")
        say(f"plain transformers writes {sum(a != b for a, b in zip(written, alone, strict=True))} of them otherwise")


def first() -> bool:
    """Tell whether this rank speaks for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Print on one rank."""
    if first():
        print(text, flush=True)


if __name__ == "__main__":
    main()
