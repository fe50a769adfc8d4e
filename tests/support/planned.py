"""Bytes that a cache allocates, and a folder with the configuration of a model."""
import pytest
import torch
from models import tiny


def allocated(cache):
    """Bytes by buffer, read off the tensors themselves."""
    found = {}
    for layer in cache.layers:
        for name, given in layer.state.buffers.items():
            t = getattr(layer.state, name)
            for part, x in t._asdict().items() if isinstance(given, tuple) else ((None, t),):
                key = f"{name}.{part}" if part else name
                if isinstance(x, torch.Tensor):
                    found[key] = found.get(key, 0) + x.nbytes
    return found | {"row lengths": sum(x.nbytes for x in cache.row_lengths.values())}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A config without weights is enough."""
    path = tmp_path_factory.mktemp("model")
    config = tiny().config
    config.dtype = torch.float32
    config.save_pretrained(path)
    return str(path)
