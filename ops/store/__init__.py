"""The store: where tokens live, and the ops that move them. Everything else reads it through its views."""
