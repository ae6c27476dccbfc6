"""Read inputs: names to files, files to slices, slices to records.

    discovery       names, folders, globs and lists to input files
    detection       what their records are, from one look at the first of each file
    formats         what a reader is: FirstRecords, Reader, LineReader, DocumentReader
    text, jsonl, columnar, indexed_tokens, tokenized     the readers
    byte_streams    what readers of streams use: opening, decompressing, cutting into lines
    record_columns  columns that a reader has read, to records

`mixing.units` cuts files into slices. Memory does not depend on the size of a file.
"""
