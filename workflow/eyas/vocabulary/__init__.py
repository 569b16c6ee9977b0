"""Token counts to the draft vocabulary: `t2d` and `d2t`."""

from eyas.vocabulary.mapping import VocabularyMap, build_map, read_map, write_map

__all__ = ["VocabularyMap", "build_map", "read_map", "write_map"]
