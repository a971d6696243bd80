"""From a model argument to parameters: finding the folder, reading the checkpoint, or making a random one."""
