"""What may not be weakened."""


class WeakDurability(Exception):
    """The database would acknowledge what a power cut can take back; the message says which setting to change."""
