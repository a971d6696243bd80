"""Output that satisfies a schema, a regular expression, a grammar or the tool call syntax, or is refused before it starts.

`spec` says what is asked for, `precheck` refuses what would not be enforced, `compiler` compiles off the loop, and
`matcher` walks the tokens of one sequence and fills its masks. No torch anywhere; a backend library is imported only when
the first grammar is compiled.
"""
