"""What `packer stats`, `plan`, `show` and `trace` tell of data: reports, and what renders them."""
