"""Requests and responses as this dialect spells them, one file per resource."""
