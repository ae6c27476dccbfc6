"""Plan rows from the lengths of documents alone.

fitting    documents to pieces that each fit into a row
plan       pieces to rows, by one of eleven strategies
window     the pieces of a work unit, planned a window at a time
labels     which tokens of a piece are trained on
figures    figures of rows, and how few there could be
sequences  all of it in memory: pack_sequences
"""
