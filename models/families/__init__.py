"""Model families: conversion of a configuration to a DecoderConfig."""
