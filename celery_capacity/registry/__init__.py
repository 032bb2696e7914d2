"""Registries: one contract, several stores, chosen by URL."""

from .contract import Registry, Reservation
from .urls import mask_url, open_registry

__all__ = ("Registry", "Reservation", "mask_url", "open_registry")
