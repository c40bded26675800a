# Sourced by scripts before they go to another folder. With --help a script prints the comment that it begins with, and ends.
# setup.sh, which may be copied alone, does so by itself.
case "${1:-}" in
  -h | --help) sed -n '2,${/^#/!q;s/^# \{0,1\}//;p}' "$0"; exit 0 ;;
esac

# has_option WORD...: whether one of them begins with a dash, for scripts that take no options.
has_option() {
  local word
  for word; do [[ $word != -* ]] || return 0; done
  return 1
}
