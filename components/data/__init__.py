"""From text files to batches: sources.py reads documents, cache.py tokenizes them once, packed.py cuts sequences and
takes the parts that a job asks for, order.py says which sequence comes when, loader.py makes batches.
stream.py and writer.py read and tokenize what is not tokenized before; hub.py asks the Hugging Face hub.
"""

from components.data.cache import DataSpec, TokenCache, data_spec, prepare
from components.data.packed import PackedSequences, build_datasets

__all__ = ["DataSpec", "PackedSequences", "TokenCache", "build_datasets", "data_spec", "prepare"]
