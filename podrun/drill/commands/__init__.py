"""The verb ``podrun drill``."""
