"""The lab: trains, evaluates and reports, on top of the library. Needs ``pip install 'parzen[lab]'``."""
