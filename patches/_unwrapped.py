"""The model inside an adapter or a wrapper of torch.compile."""
import torch


def unwrapped(model):
    """The model inside an adapter of PEFT or a wrapper of torch.compile. Their generate() is that of the model."""
    while isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    if type(model).__module__.split(".")[0] == "peft" and hasattr(model, "get_base_model"):
        return model.get_base_model()
    return model
