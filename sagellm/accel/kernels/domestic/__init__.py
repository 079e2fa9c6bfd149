"""Vendors of accelerators: what is known of each, and which of them this machine has."""

from sagellm.accel.kernels.domestic.probe import Found, Lack, probe
from sagellm.accel.kernels.domestic.vendors import VENDORS, Vendor, find_vendor

__all__ = ["VENDORS", "Found", "Lack", "Vendor", "find_vendor", "probe"]
