"""Answer prompts over HTTP with a sharded model: the first rank listens, all ranks generate.

    torchrun --standalone --nproc-per-node 2 examples/serve.py
    torchrun --standalone --nproc-per-node 2 examples/serve.py --model runs/pretrain/model
    curl --data 'The import system' http://127.0.0.1:8000

The first rank tells the others each prompt. The model, of shard-llama, has random weights, or is one of `pretrain.py`.
"""

from __future__ import annotations

import argparse
import queue
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore

BEAT = 60.0  # seconds: so often the others hear from the first rank, before their collective's timeout


def listen(port: int) -> queue.Queue:
    """Return a queue of (prompt, where its answer goes), which a server in a thread fills."""
    waiting = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = queue.Queue()
            prompt = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            waiting.put((prompt or b" ", answer))
            text = answer.get()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"listening at http://127.0.0.1:{server.server_port}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return waiting


def main() -> None:
    """Shard the model over all ranks and answer."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="a folder with a byte-level Llama")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    shardcore.launch_from_torch()
    ways = {"tp": dist.get_world_size(), "inference_only": True}
    if options.model is None:
        torch.manual_seed(0)  # the same weights on every rank
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2}
        config = LlamaConfig(**sizes, num_attention_heads=4, bos_token_id=None, eos_token_id=None)
        model = shardcore.shard(LlamaForCausalLM(config), **ways)
    else:
        model = shardcore.from_pretrained(LlamaForCausalLM, options.model, **ways)
    waiting = listen(options.port) if dist.get_rank() == 0 else None
    while True:
        prompt, answer = [b""], None
        with suppress(queue.Empty):
            if waiting is not None:
                prompt[0], answer = waiting.get(timeout=BEAT)
        dist.broadcast_object_list(prompt)
        if prompt[0]:
            ids = torch.tensor([list(prompt[0])], device=model.device)
            new = model.generate(ids, max_new_tokens=options.tokens, do_sample=False, pad_token_id=0)
            if answer is not None:
                answer.put(bytes(new[0, ids.size(1) :].tolist()))


if __name__ == "__main__":
    main()
