"""The recall model, a small model that really retrieves: its tasks, its training, and its weights."""
