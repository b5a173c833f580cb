"""The contract between the engine and plugins (spec, metadata, layout, backend, support), and the engine itself. Imports no other
package of Headway and no kernel library."""
