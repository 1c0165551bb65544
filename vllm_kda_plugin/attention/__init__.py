"""The attention backend chosen with ``--attention-backend CUSTOM``."""
