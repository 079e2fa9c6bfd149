"""A CPU device for LMDeploy's PyTorch engine, from outside its tree.

`device` says what the engine may ask of it, `runtime` plays the part of `torch.cuda`, `backend` picks the operators,
and one file holds each operator family.
"""
