# Sourced by the scripts beside it that have gone from where they were called to the project.
# from_caller PATH: the absolute path of what it was there.
from_caller() { (cd "$OLDPWD" && realpath -m -- "$1"); }
