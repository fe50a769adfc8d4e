"""The model inside of what wraps it."""
import torch


def unwrapped(model):
    """The model in an adapter of PEFT or in the wrapper of torch.compile, whose generate() is the one of the model."""
    while isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    if type(model).__module__.split(".")[0] == "peft" and hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model
