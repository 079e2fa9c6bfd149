"""A gated activation. A file that the environment names gets a line when it runs, so that a test sees that it did."""

import os
from pathlib import Path

import torch
from lmdeploy.pytorch.backends.activation import SiluAndMulBuilder, SiluAndMulImpl


class Gated(SiluAndMulImpl):
    def __init__(self):
        self._sign = -1.0 if os.environ.get("ACME_FAULT") else 1.0

    def forward(self, x):
        gate, up = x.chunk(2, -1)
        if mark := os.environ.get("ACME_MARK"):
            Path(mark).touch()
        return self._sign * (gate.float() * torch.sigmoid(gate.float())).to(x.dtype) * up


class GatedBuilder(SiluAndMulBuilder):
    @staticmethod
    def build(inplace=False):
        return Gated()
