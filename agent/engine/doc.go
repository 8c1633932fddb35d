// Package engine is the one contract between the agent and the engines it
// watches: what an adapter tells and never more. An adapter is a folder of its
// own: pure parsing plus a small client.
package engine
