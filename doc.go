// Package tfhosts holds the nouns that every other package of tf-hosts shares:
// nodes and the setup that names them, the events of a run, the verdict of a
// node, the verbs of the command line and the exit codes.
//
// It is pure: standard library only, no file, no process, no connection.
package tfhosts
