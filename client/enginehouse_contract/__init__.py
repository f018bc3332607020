"""What crosses a process or a disk: tensors, errors, manifest, settings. Standard library only."""
