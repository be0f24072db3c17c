"""Models by name: the class, and the sizes it comes in by the name of the flavor."""

from models import llama

MODELS = {"llama": (llama.Llama, llama.FLAVORS)}
