"""User state: what attributes of modules, callbacks, datasets and other objects hold."""
