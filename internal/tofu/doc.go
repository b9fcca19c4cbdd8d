// Package tofu is the only package that runs OpenTofu. It finds the engine,
// starts its commands and reads saved plans.
//
// Commands that can write state run here and not through terraform-exec, which
// sets Pdeathsig (the death of the wrapper would kill tofu in the middle of an
// apply), kills 60 s after a cancel and hard-codes -no-color. Commands that only
// read a version or a plan file go through terraform-exec, whose types of
// terraform-json are the public form of OpenTofu's JSON.
//
// tofu's output goes to files which the caller follows: a pipe would kill tofu
// with SIGPIPE when the wrapper dies.
//
// The package never prints and never decides what a plan means.
package tofu
