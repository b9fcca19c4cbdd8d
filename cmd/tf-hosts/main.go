// Command tf-hosts keeps hosts as an OpenTofu graph says. One file per verb;
// this package prints, decides the exit code and wires the parts together.
package main

import "os"

func main() {
	os.Exit(newProgram().main(os.Args[1:]))
}
