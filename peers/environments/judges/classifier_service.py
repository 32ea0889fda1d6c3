"""The process behind a judge that is a classifier; imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import blake3
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Files of a folder that its hash covers."""


class ClassifierService:
    """Holds one classifier at a time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._loaded = ""
        self._hash = ""
        self._model: Any = None
        self._tokenizer: Any = None

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        self._load(request["folder"])
        if request["model"] and request["model"] != self._hash:
            return _problem(
                f"folder {self._loaded} has the hash {self._hash}, and model is "
                f"{request['model']}; use the run owner's folder"
            )
        ids = self._tokenizer(request["text"])["input_ids"]
        if len(ids) > request["tokens_max"]:
            return _problem(
                f"the text has {len(ids)} tokens; tokens_max is {request['tokens_max']}"
            )
        with torch.inference_mode():
            outputs = self._model(input_ids=torch.tensor([ids])).logits[0].float()
        if request["label"] >= len(outputs):
            return _problem(
                f"label is {request['label']}, but the classifier has {len(outputs)} outputs"
            )
        if request["output"] == "sigmoid":
            outputs = outputs.sigmoid()
        elif request["output"] == "softmax":
            outputs = outputs.softmax(0)
        score = float(outputs[request["label"]])
        return {"score": score, "tokens": len(ids), "problem": ""}

    def _load(self, folder: str) -> None:
        if folder == self._loaded:
            return
        self._loaded, self._model = "", None
        self._hash = folder_hash(Path(folder))
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        self._tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        self._model = AutoModelForSequenceClassification.from_pretrained(
            folder, use_safetensors=True, dtype=torch.float32, **local
        ).eval()
        self._loaded = folder


def folder_hash(folder: Path) -> str:
    """Hex BLAKE3 over names and contents of a model folder's files."""
    hasher = blake3.blake3(b"swarm/1/judge-folder")
    for path in sorted(folder.iterdir()):
        if path.suffix in SUFFIXES:
            hasher.update(f"\0{path.name}\0{path.stat().st_size}\0".encode())
            hasher.update_mmap(str(path.resolve()))
    return str(hasher.hexdigest())


def _problem(sentence: str) -> dict[str, Any]:
    return {"score": 0.0, "tokens": 0, "problem": sentence}
