"""The Python side of stoker: what a tokenizer library or a chat template is needed for.

Thin on purpose: the engine, the trainer and every file format but one live in C.  This package
turns text into token files (`python3 -m stoker prepare`, which `stoker prepare` executes) and
imports nothing beyond the standard library until a tokenizer or a chat template is asked for.
"""

__version__ = "0.1.0"
