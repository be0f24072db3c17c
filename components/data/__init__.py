"""From text files to batches.

- sources.py and formats.py read documents.
- cache.py tokenizes documents before training, by the processes of chunks.py; tokens.py reads what they have made.
- token_files.py reads token files of other trainers.
- stream.py and writer.py tokenize documents during training.
- packed.py cuts tokens into sequences, and splits off held-out data.
- template.py, chats.py and rows.py make rows of chats, and pairs.py rows of pairs.
- teacher.py finds and writes the rows of a teacher, which teacher_rows.py stores.
- datasets.py picks the datasets of a job.
- order.py computes the order of sequences.
- loader.py makes batches.
- hub.py talks to the Hugging Face hub.
"""

from components.data.cache import DataSpec, data_spec, prepare
from components.data.datasets import build_datasets, spec_of
from components.data.packed import PackedSequences
from components.data.tokenizer import with_rows
from components.data.tokens import TokenCache

__all__ = [
    "DataSpec",
    "PackedSequences",
    "TokenCache",
    "build_datasets",
    "data_spec",
    "prepare",
    "spec_of",
    "with_rows",
]
