"""What optax's states hold."""
