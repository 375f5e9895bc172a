"""The other side: a loop like those of torch-xla's own examples, with Hugging Face's BertForPreTraining and torch's
AdamW. Prints step times."""

from __future__ import annotations

import json
import os
import time

import torch
import transformers

from benchmarks.references.hugging_face import Rows, parser


def main() -> None:
    args = parser(__doc__).parse_args()
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = torch_xla.device()
    torch.manual_seed(0)
    model = transformers.BertForPreTraining(transformers.BertConfig(**json.loads(args.model.read_text())))
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.01)
    batches = iter(torch.utils.data.DataLoader(Rows(args.data), batch_size=args.batch_size, shuffle=True))
    times = []
    for _ in range(args.steps):
        began = time.monotonic()
        for _ in range(args.grad_accum):
            batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
            loss = model(**batch).loss / args.grad_accum
            loss.backward()
            torch_xla.sync()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        xm.wait_device_ops()
        times.append(time.monotonic() - began)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
