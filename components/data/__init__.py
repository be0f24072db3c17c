"""From text files to batches.

- sources.py reads documents; hub.py asks the Hugging Face hub
- cache.py tokenizes them once; stream.py and writer.py tokenize a stream while it is trained on
- packed.py cuts sequences, and takes the parts that a job asks for
- order.py says which sequence comes when
- loader.py makes batches
"""

from components.data.cache import DataSpec, TokenCache, data_spec, prepare
from components.data.packed import PackedSequences, build_datasets

__all__ = ["DataSpec", "PackedSequences", "TokenCache", "build_datasets", "data_spec", "prepare"]
