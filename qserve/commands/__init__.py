"""The commands of ``qserve``, a file for each: options in, the work of the other packages composed, results out."""
