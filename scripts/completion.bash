# Completes commands and options of `parka` in bash: `source scripts/completion.bash`. What they are its --help says.
_parka() {
  local current=${COMP_WORDS[COMP_CWORD]} given=() word words
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    [[ $word == [a-z]* && ${#given[@]} -lt 2 ]] || break
    [[ ${#given[@]} -eq 0 || ${given[0]} == config ]] && given+=("$word")
  done
  words=$("${COMP_WORDS[0]}" "${given[@]}" --help 2>/dev/null)
  if [[ $current == -* ]]; then
    words=$(grep -oE '^ +(-[a-zA-Z],? ?)?--[a-z-]+(,--[a-z-]+)?' <<< "$words" | grep -oE -- '--[a-z-]+')
  else
    words=$(sed -n '/^Subcommands:/,/^$/s/^  \([a-z-]*\).*/\1/p' <<< "$words")
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -o default -F _parka parka
