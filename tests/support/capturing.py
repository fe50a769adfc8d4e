"""A small model whose decode steps are captured as CUDA graphs."""
import torch
from cases import hyper_of
from models import MAX_LENGTH, prompts

import torchsparsekv

SMALL = dict(max_length=MAX_LENGTH, budget=24, sink=8, window=6, skip_layers=1, block_size=4)
IDS, MASK = prompts(3, 41)
OTHERS = prompts(3, 53, seed=4)
NEW = 12


def captured(model, method="quest", **changes):
    return torchsparsekv.patch(model, method, step="captured", **hyper_of(method, **{**SMALL, **changes}))


def said(model, ids=IDS, mask=MASK, new=NEW, **options):
    out = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False)
    return model.generate(input_ids=ids, attention_mask=mask, **out, **options)


BREAKS = {
    r"aten\._local_scalar_dense\.default waits for the device": lambda x: x.sum().item(),
    r"aten\.nonzero\.default waits for the device": lambda x: (x > 0).nonzero(),
    r"aten\.index\.Tensor waits for the device": lambda x: x[x > 0],
    r"aten\.index_put_\.default waits for the device": lambda x: x.clone().__setitem__(x[..., 0] > 9, x[0, 0]),
    "CUDA error: operation not permitted when stream is capturing": lambda _: torch.cuda.current_stream().synchronize(),
}  # fmt: skip
