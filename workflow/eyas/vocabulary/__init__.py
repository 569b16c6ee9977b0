"""Token counts to the draft vocabulary: `t2d` and `d2t`."""

from eyas.vocabulary.counting import TokenCounts, count_supervised, sources_of_sequences
from eyas.vocabulary.mapping import VocabularyMap, build_map, read_map, write_map

__all__ = [
    "TokenCounts",
    "VocabularyMap",
    "build_map",
    "count_supervised",
    "read_map",
    "sources_of_sequences",
    "write_map",
]
